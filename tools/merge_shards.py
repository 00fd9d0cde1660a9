"""Join shards into one data set: the parts of `--partition I/N`, or any of one tokenizer.

    python tools/merge_shards.py 'data/mine-*-of-00008_text_document' data/mine_text_document

The documents follow in the order of the inputs (a glob's in the order of its names), so joined
partitions are, byte for byte, what one machine would have written; that each begins where the one
before ended is checked. gpt-neox's `merge_datasets.py` writes the same .bin and .idx. Reading the
list or the glob as `data_path` needs no merge.
"""

from __future__ import annotations

from megatron import entry
from megatron.data.errors import DataError
from megatron.data.shards.joined import find_prefixes
from megatron.data.shards.merge import merge


@entry.reports(DataError)
def main(argv: list[str] | None = None) -> int:
    parser = entry.parser(__doc__)
    parser.add_argument("inputs", nargs="+", help="prefixes or globs of shards, in order")
    parser.add_argument("output", help="prefix of the joined shards")
    arguments = parser.parse_args(argv)
    documents, tokens = merge(find_prefixes(arguments.inputs), arguments.output)
    print(f"data_path: {arguments.output}\n{documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    entry.run(main)
