"""Join shards into one data set: the partitions of `--partition I/N`, or any of one tokenizer.

    python tools/merge_shards.py 'data/mine-*-of-00008_text_document' data/mine_text_document

The documents keep the order of the inputs; a glob is in the order of its names. Joined partitions
are therefore, byte for byte, what one machine would have written, and each partition must begin
where the one before it ended. gpt-neox's `merge_datasets.py` writes the same .bin and .idx. No
merge is needed to read the shards: `data_path` may be the list or the glob.
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
