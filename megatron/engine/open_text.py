"""Open the text that a config names: its token shards, divided into splits, or a length task."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import Config
from megatron.data.corpora.python_stdlib import resolve_data_path
from megatron.data.errors import DataError
from megatron.data.samples.blend import weights_by_documents
from megatron.data.samples.split import NO_VALIDATION, SPLITS, split_documents
from megatron.data.shards.fingerprint import fingerprint
from megatron.data.shards.interface import Shards
from megatron.data.shards.joined import join, open_each
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tasks.base import Task
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import task_of


@dataclass(frozen=True)
class Corpus:
    """A range of documents, from which a split draws samples.

    Attributes:
        shards: The opened token shards that contain the documents.
        documents: (start, end), the range of documents [start, end) of `shards`.
        weight: The relative weight of this corpus among the corpora of the split.
    """

    shards: Shards
    documents: tuple[int, int]
    weight: float = 1.0


@dataclass(frozen=True)
class Text:
    """The opened text of a job.

    Attributes:
        shards: All documents of the three splits.
        splits: The ranges of documents [start, end) of `shards` for train, valid and test.
        corpora: Maps each split's name to the corpora from which its samples are drawn.
    """

    # The evaluation by length reads `shards`.

    shards: Shards
    splits: list[tuple[int, int]]
    corpora: dict[str, list[Corpus]]

    @property
    def about(self) -> str:
        tokens = int(self.shards.sizes.sum(dtype="int64"))
        none = "" if self.splits[1][0] < self.splits[1][1] else NO_VALIDATION
        return f"{tokens:,} tokens in {len(self.shards):,} documents{none}"

    def content(self) -> str:
        return fingerprint(self.shards)


def open_text(config: Config, tokenizer: Tokenizer) -> Text | Task:
    """Open every token shard that the config names.

    If the config names a length task instead, return the task, which generates its samples itself.

    Raises:
        DataError: The shards cannot be read, were made with another tokenizer, or cannot be divided
            into the splits.
    """
    # If the config sets `data_path`, the corpus there is divided by `split` into train, valid and
    # test. Otherwise `train_data_paths`, `valid_data_paths` and `test_data_paths` name the corpora
    # of each split, which then follow each other in `Text.shards`. A length task must have examples
    # of each of `eval_lengths`.
    task, data = task_of(config), config.data
    if task is not None:
        for length in config.evaluation.eval_lengths:
            task.require(length)
        return task
    if not data.train_data_paths:
        prefix = resolve_data_path(data.data_path, data.data_dir, tokenizer)
        readers = open_each(prefix, tokenizer)
        _require_ends(config, readers)
        shards = join(readers)
        splits = split_documents(data.split, len(shards))
        corpora = {name: [Corpus(shards, each)] for name, each in zip(SPLITS, splits, strict=True)}
        return Text(shards, splits, corpora)
    given = (
        (data.train_data_paths, data.train_data_weights),
        (data.valid_data_paths, data.valid_data_weights),
        (data.test_data_paths, data.test_data_weights),
    )
    opened: dict[str, list[ShardReader]] = {}  # splits may share a path
    readers: list[ShardReader] = []
    splits, corpora = [], {}
    for name, (paths, weights) in zip(SPLITS, given, strict=True):
        start = sum(map(len, readers))
        for path in paths:
            if path not in opened:
                opened[path] = open_each(path, tokenizer)
            readers += opened[path]
        splits.append((start, sum(map(len, readers))))
        shards = [join(opened[path]) for path in paths]
        if data.weight_by_num_documents:
            weights = weights_by_documents(list(map(len, shards)), data.weighted_sampler_alpha)
        corpora[name] = [
            Corpus(each, (0, len(each)), weight)
            for each, weight in zip(shards, weights or [1.0] * len(shards), strict=True)
        ]
    _require_ends(config, readers)
    return Text(join(readers), splits, corpora)


def _require_ends(config: Config, shards: Sequence[ShardReader]) -> None:
    """Check that the shards contain end-of-document tokens if the config needs them.

    Raises:
        DataError: The shards were made without end-of-document tokens.
    """
    # The keys `reset_attention_mask` and `eod_mask_loss` need them.
    asked = {
        "reset_attention_mask": config.model.reset_attention_mask,
        "eod_mask_loss": config.training.eod_mask_loss,
    }
    key = next((key for key, value in asked.items() if value), None)
    for shard in shards if key else ():
        if (read_manifest(shard.prefix) or {}).get("append_eod") is False:
            raise DataError(
                f"{shard.prefix} has no end-of-document tokens, but {key} is true; prepare the "
                f"text again without --no-append-eod, or drop {key}"
            )
