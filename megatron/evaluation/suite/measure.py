"""Define the inputs and the results of the measures in the suite."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from megatron.data.errors import DataError
from megatron.data.shards.interface import Shards
from megatron.engine.errors import DivergedError
from megatron.evaluation.losses import NOT_FINITE, LossFn, scores_of_sequences
from megatron.evaluation.suite.intervals import Estimate
from megatron.model.block import limited_window
from megatron.parallel.groups import Groups

REPEATED = 32
"""Two sequences repeat each other if they share half of their runs of this many tokens."""


@dataclass(frozen=True)
class Row:
    """One result of a measure.

    Attributes:
        at: The conditions of the result, such as {"length": 128, "depth": 0.5}.
        estimate: The measured value with its interval.
        also: Further columns of the tables.
    """

    # In the plot, the first entry of `at` is the x axis, and each combination of the other entries
    # is a curve.

    at: Mapping[str, Any]
    estimate: Estimate
    also: Mapping[str, Any] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """Return the result as a flat dict, which becomes a line of the CSV file."""
        return {**self.at, **asdict(self.estimate), **self.also}


@dataclass(frozen=True)
class Measure:
    """One measurement of a model, with its results.

    Attributes:
        name: The name of the measure's files, without their endings.
        title: The title of the measure in the report.
        unit: The quantity and unit of the results, for tables and axes.
        says: One sentence about the results.
        rows: The results.
        answer: The conclusion from the results as data, for `report.json`, or None.
        drawn: Whether the report has a picture of the results.
    """

    name: str
    title: str
    unit: str
    says: str
    rows: list[Row]
    answer: Any = None
    drawn: bool = True


@dataclass(frozen=True)
class Sample:
    """The text on which the suite measures a model.

    Attributes:
        sequences_nT: The tokens of n sequences, int64 [n, longest + 1]. Each sequence is part of a
            single document. `longest` is the largest of `lengths`.
        documents: The document of each sequence, [n], in ascending order. Documents that repeat
            each other have the same number.
        train_length: The length at which the model was trained, in tokens.
        lengths: The lengths at which the model is measured, in tokens and in ascending order.
        tokens: The approximate number of tokens that a measure reads for each result.
    """

    sequences_nT: np.ndarray
    documents: np.ndarray
    train_length: int
    lengths: tuple[int, ...]
    tokens: int

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def tail(self) -> int:
        """The number of tokens at the end of a sequence that some measures score."""
        # These measures are `far_swap` and `receptive_field`.
        return max(1, min(128, self.longest // 8))

    @property
    def too_short(self) -> str:
        """The sentence that a report shows instead of results if the sequences are too short."""
        length = self.train_length
        return f"Not measured: {self.longest:,} tokens are too few after training at {length:,}."

    def bins(self, first: int) -> list[tuple[int, int]]:
        """Return bins of context lengths. A bin (c, end) contains the lengths c to end - 1.

        Args:
            first: The start of the first bin.
        """
        # Each bin is twice as wide as the previous one; the last bin may be narrower.
        starts = [first]
        while 2 * starts[-1] < self.longest:
            starts.append(2 * starts[-1])
        return list(zip(starts, [*starts[1:], self.longest + 1], strict=True))

    def random(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        """Return random tokens, drawn uniformly from the tokens that occur in the text."""
        return rng.choice(np.unique(self.sequences_nT), shape)


def read_sample(
    shards: Shards,
    documents: tuple[int, int],
    lengths: tuple[int, ...],
    *,
    train_length: int,
    tokens: int,
    eod: int,
) -> Sample:
    """Cut sequences of the largest length out of documents that are long enough.

    Args:
        shards: The tokens of all documents.
        documents: The range of documents to read, as (start, end). The end is not included.
        lengths: The lengths at which the model is measured, in ascending order.
        train_length: The length at which the model was trained.
        tokens: The approximate number of tokens in all sequences.
        eod: The id of the end-of-document token, which is not part of a document's text.

    Raises:
        DataError: Fewer than 2 different documents are long enough.
    """
    # Shorter documents are left out, because a sequence across the end of a document would contain
    # unrelated text. So are sequences with such an end inside. If there are few documents,
    # several sequences are cut out of each. At least 16 sequences are read if the documents contain
    # that many.
    size, rng = lengths[-1] + 1, np.random.default_rng(0)
    begins = shards.pointers[slice(*documents)] // shards.dtype.itemsize
    texts = [(int(b), int(n)) for b, n in zip(begins, shards.sizes[slice(*documents)], strict=True)]
    texts = [(b, n - int(shards.tokens[b + n - 1 : b + n][0] == eod)) for b, n in texts if n]
    whole = {number: text for number, text in enumerate(texts) if text[1] >= size}
    if len(whole) < 2:
        longest = max((n for _, n in texts), default=0)
        raise DataError(
            f"{len(whole)} of {len(texts)} documents have the {size} tokens that --suite needs, "
            f"and it needs 2 of them (the longest has {longest}); give shorter --lengths, the "
            "split more of `split`, or the text as more documents (one a file or a line)"
        )
    wanted = max(16, tokens // size)
    chosen = sorted(rng.permutation(list(whole))[:wanted].tolist())
    each = -(-wanted // len(chosen))
    rows, owners, first_with = [], [], {}
    for number in chosen:
        begin, length = whole[number]
        # Sequences of an exact copy may be of other parts, and then do not show that it is one.
        owner = first_with.setdefault(shards.tokens[begin : begin + length].tobytes(), number)
        count = min(each, length // size)
        room = length // count - size
        for part in range(count):
            start = begin + part * (length // count) + int(rng.integers(room + 1))
            if eod not in (row := np.asarray(shards.tokens[start : start + size], np.int64)):
                rows.append(row)
                owners.append(owner)
    if not rows:
        raise DataError(f"all long documents contain {eod}, the end of a document; split them")
    sample = Sample(np.stack(rows), np.array(owners), train_length, lengths, tokens)
    return copies_as_one(sample)


def copies_as_one(sample: Sample) -> Sample:
    """Return the sample with the documents that repeat each other as one document.

    Raises:
        DataError: All documents repeat each other.
    """
    # Otherwise intervals would take copies for independent, and far-swap would swap a text with a
    # copy of itself.
    numbers = distinct_documents(sample.sequences_nT, sample.documents)
    first = np.unique(numbers, return_index=True)[1]
    if len(first) < 2:
        raise DataError(
            f"all documents with {sample.longest + 1} tokens repeat each other or have an end in "
            "them, and --suite needs 2 different ones; give the split more of `split`")  # fmt: skip
    order = np.argsort(numbers, kind="stable")
    documents = sample.documents[first[numbers[order]]]
    return replace(sample, sequences_nT=sample.sequences_nT[order], documents=documents)


def distinct_documents(sequences_nT: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Number the distinct documents, and return the number of each sequence's document, [n].

    Documents that repeat each other get the same number.

    Args:
        sequences_nT: The tokens of n sequences, int64 [n, T].
        documents: The document of each sequence, [n].
    """
    size = min(REPEATED, sequences_nT.shape[1])
    factors = np.random.default_rng(0).integers(1 << 62, size=size)
    runs_nR = np.lib.stride_tricks.sliding_window_view(sequences_nT, size, axis=1) @ factors
    columns = np.unique(runs_nR, return_inverse=True)[1].ravel()
    owner = np.repeat(np.arange(len(runs_nR)), runs_nR.shape[1])
    counts: Any = sparse.csr_matrix((np.ones(len(owner)), (owner, columns)))
    holds = counts.sign()
    shared = (holds @ holds.T).tocoo()
    runs = np.asarray(holds.sum(1)).ravel()
    alike = 2 * shared.data >= np.minimum(runs[shared.row], runs[shared.col])
    numbers = np.unique(documents, return_inverse=True)[1]
    ends = numbers[shared.row[alike]], numbers[shared.col[alike]]
    graph = sparse.coo_matrix((np.ones(len(ends[0])), ends), shape=(numbers.max() + 1,) * 2)
    return connected_components(graph, directed=False)[1][numbers]


@dataclass
class Subject:
    """A model that is measured.

    Attributes:
        model: The model.
        groups: The job's process groups.
        batch_tokens: The approximate number of tokens in a forward pass.
        tick: A function that is called after each batch, with the batch's number of tokens.
        loss_fn: The function that returns the loss of each target. If None, `model` is called.
        name: A text that names the model in the report.
    """

    # The report uses the name to say which model chose the key tokens.

    model: torch.nn.Module
    groups: Groups
    batch_tokens: int
    tick: Callable[[int], object] = lambda tokens: None
    loss_fn: LossFn | None = None
    name: str = "the model itself"

    def losses(
        self, sequences_nT: np.ndarray, *, window: int | None = None, last_only: bool = False
    ) -> np.ndarray:
        """Return the loss of each target in nats, as float64 [n, T - 1].

        Every rank must call this method.

        Args:
            sequences_nT: The tokens of n sequences, int64 [n, T].
            window: The number of tokens that each layer sees, including the current token. None
                means the model's own limit.
            last_only: Whether to return only the loss of the last target, [n, 1].

        Raises:
            DivergedError: A loss is infinite or not a number.
        """
        width = 1 if last_only else sequences_nT.shape[1] - 1
        with limited_window(self.model, window):
            losses_nT = scores_of_sequences(
                self.loss_fn or self.model, sequences_nT, self.groups, width=width, tick=self.tick,
                score=lambda losses_BT, _: losses_BT[:, -width:], batch_tokens=self.batch_tokens,
            )  # fmt: skip
        if not np.isfinite(losses_nT).all():
            raise DivergedError(NOT_FINITE)
        return losses_nT
