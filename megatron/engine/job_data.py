"""Read the batches of a job, for training and evaluation, from the text that the config names."""

from typing import Any

import numpy as np

from megatron.config import Config
from megatron.data.samples.base import Samples
from megatron.data.samples.blend import BlendedDataset
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.index_cache import cache_folder
from megatron.data.samples.loader import TrainLoader, published_start, sample_counts
from megatron.data.samples.split import SPLITS
from megatron.data.tasks.base import Task
from megatron.data.tasks.samples import TaskSamples
from megatron.engine.build import counts_targets, tokenizer_of
from megatron.engine.open_text import open_text
from megatron.engine.training.batches import Counting
from megatron.parallel.groups import Groups


def samples_of_run(config: Config) -> dict[str, int]:
    """Return a dict from split name to the number of samples that a run of `config` reads."""
    t, batch = config.training, config.batch.train_batch_size
    counts = sample_counts(t.train_iters, t.eval_interval, t.eval_iters, batch)
    return dict(zip(SPLITS, counts, strict=True))


class JobData:
    """The tokenizer and the batches of a job. All ranks may create this object at the same time.

    Attributes:
        tokenizer: The tokenizer that the config names.
        text: The opened token shards and splits, or the length task that generates the samples.
        identity: The values that determine the order and the text of the samples, as JSON values.
        wanted: Maps each split's name to the number of samples that the run reads from it.
        counting: The rules for the targets that count in the loss, and for their weights.
    """

    # Checkpoints record `identity`.

    def __init__(self, config: Config, groups: Groups):
        self.config, self.groups = config, groups
        self.tokenizer = tokenizer_of(config)
        self.text = open_text(config, self.tokenizer)
        self.counting = Counting(
            uncounted_after=self.tokenizer.eod if config.training.eod_mask_loss else None,
            per_token=counts_targets(config),
        )
        self.identity = self._identity()
        self.wanted = samples_of_run(config)
        self._held_out: dict[str, Samples | None] = {}

    def _identity(self) -> dict[str, Any]:
        text, config = self.text, self.config
        run = {"seed": config.training.seed, "seq_length": config.model.seq_length}
        if isinstance(text, Task):
            return run | text.identity()
        found: dict[str, Any] = run | {
            "splits": [list(documents) for documents in text.splits],
            "documents": len(text.shards),
            "tokens": int(text.shards.sizes.sum(dtype="int64")),
            "content": text.content(),
        }
        if config.data.train_data_paths:
            found["corpora"] = {
                name: [[len(corpus.shards), corpus.weight] for corpus in corpora]
                for name, corpora in text.corpora.items()
            }
        return found

    def document_lengths(self) -> list[tuple[np.ndarray, float]]:
        """Return the lengths of the documents of each training corpus, and the corpus's weight."""
        corpora = [] if isinstance(self.text, Task) else self.text.corpora["train"]
        return [(each.shards.sizes[slice(*each.documents)], each.weight) for each in corpora]

    def training(self, *, index_samples: int, consumed: int, least: int = 0) -> TrainLoader | None:
        """Return this rank's training batches, or None if the run reads no training sample.

        Args:
            index_samples: The number of training samples that the run planned when it began. It
                determines the order of the samples.
            consumed: The number of samples already used; the batches start after them.
            least: The smallest number of samples that the batches must contain.
        """
        # The order of the samples depends on the size of the sample index, as in GPT-NeoX.
        dataset = self._dataset("train", index_samples, consumed + least)
        return None if dataset is None else self._loader(dataset, consumed)

    def first_samples(self, count: int) -> np.ndarray | None:
        """Return the first `count` training samples, int64 [count, tokens]; None without text.

        Every rank gets all of these samples.
        """
        dataset = self._dataset("train", self.wanted["train"] or count, count)
        return None if dataset is None else dataset.batch(range(count))

    def held_out(self, name: str, *, evaluations_before: int) -> TrainLoader | None:
        """Return this rank's batches for one evaluation during training, or None if there are none.

        Args:
            name: The split, `valid` or `test`.
            evaluations_before: The number of earlier evaluations, whose batches are skipped.
        """
        if name not in self._held_out:
            self._held_out[name] = self._dataset(name, self.wanted[name])
        dataset = self._held_out[name]
        if dataset is None:
            return None
        per_evaluation = self.config.training.eval_iters * self.config.batch.train_batch_size
        return self._loader(dataset, evaluations_before * per_evaluation)

    def held_out_at(self, name: str, *, iteration: int) -> TrainLoader | None:
        """Return the batches that GPT-NeoX evaluates when it resumes a run at step `iteration`.

        The result is None if there are no batches.

        Args:
            name: The split, `valid` or `test`.
            iteration: The number of optimizer steps that the run has taken.
        """
        loader, t = self.held_out(name, evaluations_before=0), self.config.training
        if loader is not None:
            # A resumed GPT-NeoX run counts micro-batches as steps, so its batches may begin later.
            loader.consumed_samples = published_start(
                loader, name, iteration, eval_interval=t.eval_interval, eval_iters=t.eval_iters
            )
        return loader

    def _dataset(self, name: str, index_samples: int, least: int = 0) -> Samples | None:
        """Return the samples of the split `name`, or None if the run uses none.

        Args:
            index_samples: The number of samples that the run planned when it began.
            least: The smallest number of samples that the result must have.
        """
        total = max(index_samples, self.wanted[name], least)
        model, seed = self.config.model, self.config.training.seed
        length = model.seq_length if name == "train" else model.seq_length_val
        assert length is not None  # the config derives seq_length_val
        if isinstance(self.text, Task):
            return TaskSamples(self.text, index_samples, length, seed, name, total)
        corpora = self.text.corpora[name]
        if total == 0 or all(start == end for start, end in (each.documents for each in corpora)):
            return None

        def build(number: int, samples: int, extend_to: int) -> TokenDataset:
            shards, documents = corpora[number].shards, corpora[number].documents
            part = name if len(corpora) == 1 else f"{name}_{number}"
            return TokenDataset(
                shards, documents, samples, length, seed, part,
                cache_dir=cache_folder(shards.folder), extend_to=extend_to,
            )  # fmt: skip

        if not self.config.data.train_data_paths:
            return build(0, index_samples, total)
        weights = [corpus.weight for corpus in corpora]
        return BlendedDataset(build, weights, index_samples, name, extend_to=total)

    def _loader(self, dataset: Samples, consumed: int) -> TrainLoader:
        batch, vocab_size = self.config.batch, self.tokenizer.vocab_size
        total, micro = batch.train_batch_size, batch.train_micro_batch_size_per_gpu
        rank, size = self.groups.data_rank, self.groups.data_size
        return TrainLoader(dataset, total, micro, rank, size, consumed, vocab_size=vocab_size)
