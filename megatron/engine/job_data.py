"""A job's text: tokenizer, shards, splits, and the loaders that read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config import Config
from megatron.data import ShardError, open_splits
from megatron.data.dataset import TokenDataset
from megatron.data.loader import TrainLoader, sample_counts
from megatron.engine.build import data_prefix, tokenizer_of
from megatron.parallel import Groups

SPLITS = ("train", "valid", "test")


class CheckedLoader(TrainLoader):
    """A loader that refuses token ids which the tokenizer does not have.

    Shards made elsewhere carry no tokenizer's name; on a GPU such an id ends in a device assert.
    """

    vocab_size: int

    def __next__(self) -> np.ndarray:
        batch_BT = super().__next__()
        if (largest := int(batch_BT.max())) >= self.vocab_size:
            raise ShardError(
                f"{self.dataset.shards.prefix}: holds token {largest}, but the tokenizer has only "
                f"{self.vocab_size}; set tokenizer_type, vocab_file and merge_file to what the "
                "shards were made with"
            )
        return batch_BT


class JobData:
    """Opens the config's shards (every rank may do so at once).

    Attributes:
        identity: what the order of the samples depends on, as JSON values; a checkpoint keeps it.
        wanted: split -> samples that the run reads.
    """

    def __init__(self, config: Config, groups: Groups):
        self.config, self.groups = config, groups
        self.tokenizer = tokenizer_of(config)
        prefix = data_prefix(config, self.tokenizer)
        self.shards, self.splits = open_splits(prefix, config.data.split, self.tokenizer)
        self.identity: dict[str, Any] = {
            "seed": config.training.seed,
            "splits": [list(documents) for documents in self.splits],
            "seq_length": config.model.seq_length,
            "documents": len(self.shards),
            "tokens": int(self.shards.sizes.sum(dtype="int64")),
        }
        training = config.training
        counts = sample_counts(
            training.train_iters,
            training.eval_interval,
            training.eval_iters,
            config.batch.train_batch_size,
        )
        self.wanted = dict(zip(SPLITS, counts, strict=True))
        self._held_out: dict[str, TokenDataset | None] = {}

    def training(self, *, index_samples: int, consumed: int) -> TrainLoader | None:
        """Training batches from sample `consumed` on, in the order built for `index_samples`."""
        dataset = self._dataset("train", index_samples)
        return None if dataset is None else self._loader(dataset, consumed)

    def held_out(self, name: str, *, evaluations_before: int) -> TrainLoader | None:
        """Batches of `valid` or `test` for one evaluation: each reads new samples, in turn."""
        if name not in self._held_out:
            self._held_out[name] = self._dataset(name, self.wanted[name])
        dataset = self._held_out[name]
        per_evaluation = self.config.training.eval_iters * self.config.batch.train_batch_size
        return dataset and self._loader(dataset, evaluations_before * per_evaluation)

    def _dataset(self, name: str, index_samples: int) -> TokenDataset | None:
        """The split `name`; None where it has no documents or nothing is wanted of it."""
        start, end = self.splits[SPLITS.index(name)]
        total = max(index_samples, self.wanted[name])
        if start == end or total == 0:
            return None
        model = self.config.model
        return TokenDataset(
            self.shards,
            (start, end),
            index_samples,
            model.seq_length if name == "train" else model.seq_length_val,
            self.config.training.seed,
            name,
            extend_to=total,
        )

    def _loader(self, dataset: TokenDataset, consumed: int) -> TrainLoader:
        batch = self.config.batch
        loader = CheckedLoader(
            dataset,
            batch.train_batch_size,
            batch.train_micro_batch_size_per_gpu,
            self.groups.data_rank,
            self.groups.data_size,
            consumed,
        )
        loader.vocab_size = self.tokenizer.vocab_size
        return loader
