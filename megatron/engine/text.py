"""A job's text: tokenizer, shards, splits, and the loaders that read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config import Config
from megatron.data.errors import ShardError
from megatron.data.samples.blend import BlendedDataset, weights_by_documents
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.index_cache import cache_folder
from megatron.data.samples.loader import TrainLoader, published_start, sample_counts
from megatron.data.samples.split import open_checked, open_splits
from megatron.data.shards.joined import JoinedShards
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import data_prefix, tokenizer_of
from megatron.parallel import Groups

SPLITS = ("train", "valid", "test")
Shards = ShardReader | JoinedShards


def evaluation_text(config: Config, tokenizer: Tokenizer) -> tuple[Shards, list[tuple[int, int]]]:
    """(shards, [train, valid, test] as ranges of documents) that perplexity is measured on.

    With corpora of their own for each split, those of a split one after the other.
    """
    data = config.data
    if not data.train_data_paths:
        return open_splits(data_prefix(config, tokenizer), data.split, tokenizer)
    names, ends = [], [0]
    for paths in (data.train_data_paths, data.valid_data_paths, data.test_data_paths):
        opened = [open_checked(path, tokenizer) for path in paths]
        names += [name for one in opened for name in getattr(one, "prefixes", [one.prefix])]
        ends.append(ends[-1] + sum(map(len, opened)))
    return JoinedShards(names), [(ends[i], ends[i + 1]) for i in range(3)]


def samples_of_run(config: Config) -> dict[str, int]:
    """Split -> number of samples that the run reads."""
    training, batch = config.training, config.batch.train_batch_size
    counts = sample_counts(training.train_iters, training.eval_interval, training.eval_iters, batch)
    return dict(zip(SPLITS, counts, strict=True))


class CheckedLoader(TrainLoader):
    """A loader that refuses token ids which the tokenizer does not have.

    Shards made elsewhere carry no tokenizer's name; on a GPU such an id ends in a device assert.
    """

    vocab_size: int

    def __next__(self) -> np.ndarray:
        batch_BT = super().__next__()
        if (largest := int(batch_BT.max())) >= self.vocab_size:
            raise ShardError(
                f"{self.dataset.where}: holds token {largest}, but the tokenizer has only "
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
        self.shards, self.splits = evaluation_text(config, self.tokenizer)
        self.corpora = {name: self._corpora(i) for i, name in enumerate(SPLITS)}
        self.identity: dict[str, Any] = {
            "seed": config.training.seed,
            "splits": [list(documents) for documents in self.splits],
            "seq_length": config.model.seq_length,
            "documents": len(self.shards),
            "tokens": int(self.shards.sizes.sum(dtype="int64")),
        }
        if config.data.train_data_paths:
            self.identity["corpora"] = {
                name: [[end - start, weight] for _, (start, end), weight in corpora]
                for name, corpora in self.corpora.items()
            }
        self.wanted = samples_of_run(config)
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

    def _corpora(self, split: int) -> list[tuple[Shards, tuple[int, int], float]]:
        """(shards, documents, weight) of each corpus of a split; one where data_path is given."""
        data = self.config.data
        if not data.train_data_paths:
            return [(self.shards, self.splits[split], 1.0)]
        paths, weights = (
            (data.train_data_paths, data.train_data_weights),
            (data.valid_data_paths, data.valid_data_weights),
            (data.test_data_paths, data.test_data_weights),
        )[split]
        opened = [open_checked(path, self.tokenizer) for path in paths]
        documents = [len(shards) for shards in opened]
        if data.weight_by_num_documents:
            weights = weights_by_documents(documents, data.weighted_sampler_alpha)
        else:
            weights = weights or [1.0] * len(paths)
        return [
            (shards, (0, n), float(weight))
            for shards, n, weight in zip(opened, documents, weights, strict=True)
        ]

    def held_out_at(self, name: str, *, iteration: int) -> TrainLoader | None:
        """Batches of `valid` or `test` where the published program, resumed at `iteration`, starts.

        The same as `held_out` after the evaluations of a run without accumulation.
        """
        dataset = self._dataset(name, self.wanted[name])
        if dataset is None:
            return None
        loader = self._loader(dataset, 0)
        loader.consumed_samples = published_start(
            name,
            dataset,
            iteration,
            micro_batch=loader.micro_batch,
            dp_size=loader.dp_size,
            micro_steps=loader.micro_steps,
            eval_interval=self.config.training.eval_interval,
            eval_iters=self.config.training.eval_iters,
        )
        return loader

    def _dataset(self, name: str, index_samples: int) -> TokenDataset | BlendedDataset | None:
        """The split `name`; None where it has no documents or nothing is wanted of it."""
        corpora = self.corpora[name]
        total = max(index_samples, self.wanted[name])
        if total == 0 or not any(end > start for _, (start, end), _ in corpora):
            return None
        model = self.config.model
        length = model.seq_length if name == "train" else model.seq_length_val

        def build(number: int, samples: int, extend_to: int) -> TokenDataset:
            shards, documents, _ = corpora[number]
            return TokenDataset(
                shards,
                documents,
                samples,
                length,
                self.config.training.seed,
                name if len(corpora) == 1 else f"{name}_{number}",
                cache_dir=cache_folder(shards.prefix),
                extend_to=extend_to,
            )

        if not self.config.data.train_data_paths:
            return build(0, index_samples, total)
        weights = [weight for _, _, weight in corpora]
        return BlendedDataset(build, weights, index_samples, name, extend_to=total)

    def _loader(self, dataset: TokenDataset | BlendedDataset, consumed: int) -> TrainLoader:
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
