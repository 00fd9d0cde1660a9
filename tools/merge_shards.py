"""Merge token shards of one tokenizer into a single data set.

    python tools/merge_shards.py 'data/mine-*-of-00008_text_document' data/mine_text_document

The documents stay in the order of the inputs. The shards that match a glob are sorted by name.
Partitions written by `prepare_data.py --partition I/N` must follow each other without a gap. The
merged files are then, byte for byte, those that a run without partitions would have written.
gpt-neox's `merge_datasets.py` writes the same .bin and .idx files. Training does not need merged
shards, because `data_path` may also be a list or a glob of shards.
"""

from megatron import entry
from megatron.data.shards.joined import find_prefixes
from megatron.data.shards.merge import merge


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Merge the shards that the command line names, and return the exit code."""
    parser = entry.parser(__doc__)
    parser.add_argument("inputs", nargs="+", help="prefixes or globs of shards, in order")
    parser.add_argument("output", help="prefix of the joined shards")
    arguments = parser.parse_args(argv)
    documents, tokens = merge(find_prefixes(arguments.inputs), arguments.output)
    print(f"data_path: {arguments.output}\n{documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    entry.run(main)
