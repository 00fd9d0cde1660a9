"""Planted models for the suite: their use of context is known, because it is written here.

Each model gives the next token the probability

    p(x) = (1 - w) p_bigram(x) + w p_context(x)

where p_context is what the model takes from the tokens that it sees, and w = 0 where it finds
nothing. The documents have something to find at every distance: `Language.document` says what.

`EXPECTED` says what a suite has to answer for each model. It was written before the suite was
changed to its second version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron.attention import choose
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.evaluation.suite.measure import Sample, Subject
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.groups import build_groups
from megatron.positional import load

TOKENS = 128
TRAINED = 32
LENGTHS = (32, 64, 128, 256, 512)
NEAR = 16
"""The reach of the order-blind copier to either side of the place that it finds."""


class Ascii(ByteLevelTokenizer):
    """A tokenizer of ASCII texts: a token is a byte."""

    def token_bytes(self, ids: np.ndarray) -> np.ndarray:
        return np.ones_like(ids)


class Language:
    """A language of documents whose tokens can be predicted from near and from far text."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        follows = self.rng.dirichlet(np.full(TOKENS, 0.05), TOKENS) + 1e-3 / TOKENS
        self.follows = follows / follows.sum(1, keepdims=True)
        self.smooth = 0.6 * self.follows + 0.4 / TOKENS

    def document(self, size: int) -> np.ndarray:
        """Return a document. Half of it repeats the document's own 8 phrases of 12 tokens.

        The rest are runs of 12 tokens, each drawn after the one before it, from a quarter of the
        vocabulary that is the document's own. So counts of tokens predict, too.
        """
        own = self.rng.choice(TOKENS, TOKENS // 4, replace=False)
        phrases, parts = self.rng.choice(own, (8, 12)), []
        favoured = np.where(np.isin(np.arange(TOKENS), own), 20.0, 1.0)
        while 12 * len(parts) < size:
            if self.rng.random() < 0.5:
                parts.append(phrases[self.rng.integers(8)])
                continue
            run = [int(self.rng.choice(own))]
            while len(run) < 12:
                chances = self.follows[run[-1]] * favoured
                run.append(int(self.rng.choice(TOKENS, p=chances / chances.sum())))
            parts.append(np.array(run))
        return np.concatenate(parts)[:size]

    def sample(self, tokens: int, documents: int) -> Sample:
        """Return one sequence of each of `documents` documents."""
        texts = np.stack([self.document(LENGTHS[-1] + 1) for _ in range(documents)])
        return Sample(texts, np.arange(documents), TRAINED, LENGTHS, tokens)


Found = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function from (tokens [B, T], targets [B, T], window) to (probability of each target, whether
anything was found), both [B, T]."""


class Planted(nn.Module):
    """A model that mixes the bigrams of the language with what `found` takes from the context."""

    def __init__(self, language: Language, found: Found | None = None, weight: float = 0.8):
        super().__init__()
        self.bigram = torch.as_tensor(language.smooth)
        self.found, self.weight, self.window = found, weight, 10**9

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss of each target in nats, fp64 [B, T]."""
        p_BT = self.bigram[tokens_BT, targets_BT]
        if self.found:
            context_BT, some_BT = self.found(tokens_BT, targets_BT, self.window)
            w_BT = self.weight * some_BT
            p_BT = (1 - w_BT) * p_BT + w_BT * context_BT
        return -torch.log(p_BT.clamp(min=1e-6))


class Sink(Planted):
    """A model of bigrams that is worse by half a nat where a window hides the first token."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_T = torch.arange(tokens_BT.shape[1]) >= self.window
        return super().forward(tokens_BT, targets_BT) + 0.5 * hidden_T


class PlantedSubject(Subject):
    """A subject whose model limits its own window."""

    def losses(
        self, sequences_nT: np.ndarray, *, window: int | None = None, last_only: bool = False
    ) -> np.ndarray:
        vars(self.model)["window"] = window or 10**9
        return super().losses(sequences_nT, last_only=last_only)


def distances(tokens_BT: Tensor) -> Tensor:
    """Return i - j for each query i and key j, [T, T]."""
    place_T = torch.arange(tokens_BT.shape[1])
    return place_T[:, None] - place_T


def pointer(reach: int = 10**9) -> Found:
    """Return a model part that predicts what followed the longest match of at most 8 tokens.

    It sees the last `reach` tokens. Matches of one token do not count.
    """

    def found(tokens_BT: Tensor, targets_BT: Tensor, window: int) -> tuple[Tensor, Tensor]:
        d_TT, seen = distances(tokens_BT), min(reach, window)
        same = tokens_BT[:, :, None] == tokens_BT[:, None]
        hits = targets_BT[:, :, None] == tokens_BT[:, None]
        hits = torch.nn.functional.pad(hits[:, :, 1:], (0, 1))  # of the token after the match
        run, p_BT = same & (d_TT > 0), torch.zeros(tokens_BT.shape, dtype=torch.float64)
        some_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        for order in range(2, 9):
            run = same & torch.nn.functional.pad(run[:, :-1, :-1], (1, 0, 1, 0))
            matches = run & (d_TT + order <= seen)
            count_BT = matches.sum(-1)
            share_BT = (matches & hits).sum(-1) / count_BT.clamp(min=1)
            p_BT = torch.where(count_BT > 0, share_BT.double(), p_BT)
            some_BT |= count_BT > 0
        return p_BT, some_BT

    return found


def bag(beyond: int = 0, power: int = 1) -> Found:
    """Return a model part that predicts tokens by how often they occurred, in any order.

    Args:
        beyond: Only tokens that are at least this many tokens away are counted.
        power: The predictions are in proportion to this power of the counts. A power above 1 is
            too sure of frequent tokens.
    """

    def found(tokens_BT: Tensor, targets_BT: Tensor, window: int) -> tuple[Tensor, Tensor]:
        d_TT = distances(tokens_BT)
        counted_TT = (d_TT >= beyond) & (d_TT < window)
        every_BTV = torch.nn.functional.one_hot(tokens_BT, TOKENS).double()
        counts_BTV = (counted_TT.double() @ every_BTV) ** power
        count_BT = counts_BTV.sum(-1)
        hits_BT = counts_BTV.gather(-1, targets_BT[..., None])[..., 0]
        return hits_BT / count_BT.clamp(min=1), count_BT > 0

    return found


def blind_copier(tokens_BT: Tensor, targets_BT: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Predict the tokens around the places around which the last 8 tokens stand, in any order."""
    d_TT, size = distances(tokens_BT), 2 * NEAR + 1

    def around(found_BTT: Tensor) -> Tensor:
        """Return the sums over the keys from NEAR before each key to NEAR after it."""
        sums = torch.nn.functional.pad(found_BTT.float(), (NEAR + 1, NEAR)).cumsum(-1)
        return sums[..., size:] - sums[..., :-size]

    same = tokens_BT[:, :, None] == tokens_BT[:, None]
    there = (around(same) > 0).float()  # of each token of the query, whether the key is near one
    last = torch.nn.functional.pad(there.cumsum(1), (0, 0, 8, 0))
    shared = last[:, 8:] - last[:, :-8]
    alike = (shared >= 8) & (d_TT >= 8 + NEAR) & (d_TT < window - NEAR)
    share = around(targets_BT[:, :, None] == tokens_BT[:, None]) / size
    count_BT = alike.sum(-1)
    return (alike * share).sum(-1).double() / count_BT.clamp(min=1), count_BT > 0


def untrained(seed: int) -> GPT:
    """Return the project's own model with random weights."""
    pos = load("kerple_log")
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32, training=False)
    shape = GPTShape(2, TOKENS, BlockShape(32, 2), 1024)
    return GPT(Plan(shape, pos, attend, seed=seed)).eval()


PLANTED: dict[str, Callable[[Language], Planted]] = {
    "bigram": Planted,
    "sink": Sink,
    "window of 16": lambda language: Planted(language, pointer(16)),
    "window of 128": lambda language: Planted(language, pointer(128)),
    "pointer": lambda language: Planted(language, pointer()),
    "bag of words": lambda language: Planted(language, bag(), 0.3),
    "harmful cache": lambda language: Planted(language, bag(TRAINED, 8), 0.97),
    "order-blind copier": lambda language: Planted(language, blind_copier, 0.5),
}
NAMES = ("untrained", *PLANTED)


def subject_of(name: str, language: Language, seed: int) -> Subject:
    groups = build_groups(torch.device("cpu"))
    if name == "untrained":
        return Subject(untrained(seed), groups, 4096)
    return PlantedSubject(PLANTED[name](language), groups, 4096)


Cells = frozenset[tuple[int, float]]


@dataclass(frozen=True)
class Expected:
    """What a suite has to answer about a model.

    Attributes:
        context: The longest context that is used, in tokens, or all answers that are right. 1 is
            the last token alone.
        far: What text beyond `TRAINED` tokens does: "helps", "harms" or "nothing".
        matters: Whether the loss depends on the content of this text.
        induction: The largest distance over which repeated random tokens are predicted, or 0.
        copy: The (length, depth) at which 16 random tokens are copied after their cue.
        passkey: The (length, depth) at which a number is found by its cue.
        keys: The longest text in which the value of one of several keys is found, or 0.
        values: The same for a key with several values.
        tracking: The same for a variable that is set to a variable, and this one to a number.
        words: The same for the words that occur most often. Counts are enough for this question.
    """

    context: int | tuple[int, ...]
    far: str
    matters: bool
    induction: int
    copy: Cells
    passkey: Cells
    keys: int | tuple[int, ...] = 0
    values: int | tuple[int, ...] = 0
    tracking: int = 0
    words: int | tuple[int, ...] = 0


NOWHERE: Cells = frozenset()
EVERYWHERE = frozenset((length, depth) for length in (128, 512) for depth in (0.0, 0.5, 0.9))
WITHIN_128 = EVERYWHERE - {(512, 0.0), (512, 0.5)}
IN_PART = (0, 256)
"""What these models see of a text of 256 tokens depends on where the answer stands."""
EITHER = (0, 256, 512)
"""Counts of words are a part of these models, but not one that must show."""
EXPECTED = {
    "untrained": Expected(1, "nothing", False, 0, NOWHERE, NOWHERE),
    "bigram": Expected(1, "nothing", False, 0, NOWHERE, NOWHERE),
    "sink": Expected(1, "nothing", False, 0, NOWHERE, NOWHERE),
    "window of 16": Expected(16, "nothing", False, 8, NOWHERE, NOWHERE),
    "window of 128": Expected(
        128, "helps", True, 64, WITHIN_128, WITHIN_128, IN_PART, IN_PART, 0, IN_PART
    ),
    "pointer": Expected(512, "helps", True, 256, EVERYWHERE, EVERYWHERE, 512, 512, 0, 512),
    "bag of words": Expected((128, 256, 512), "helps", True, 0, NOWHERE, NOWHERE, words=512),
    "harmful cache": Expected(1, "harms", True, 0, NOWHERE, NOWHERE, words=EITHER),
    "order-blind copier": Expected(512, "helps", True, 0, NOWHERE, NOWHERE, words=EITHER),
}
