"""Define the content of a grid file, without the values of its variables."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

METRICS = {"perplexity": True, "loss": True, "bits_per_byte": True, "exact": False, "token": False}
"""Maps a column of a results file to whether lower is better. Such metrics are positive, and are
compared as ratios. The others are shares of right answers, and are compared as differences."""
BEST = "best"
COLUMNS = ["cell", "seed", "folder", "length", "metric", "value"]
"""The columns of a table of results, beside one for each axis."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Value(_Strict):
    """What one value of an axis adds to the base configuration, and its seeds if it has its own."""

    configs: list[str] = []
    overrides: dict[str, Any] = {}
    seeds: list[int] = []


class Endpoint(_Strict):
    """A claim about one metric, to be tested over seeds.

    Attributes:
        of: The side that the claim is about: a value of each axis, and `length`.
        than: The other side. It has the axes and the length of `of`, except where it names others.
            `length: best` is the length at which its mean over seeds is best.
        by: The margin in percent (of shares: in points). `statistics` defines the claims.
    """

    claim: Literal["below", "above", "within", "equal", "differs"]
    of: dict[str, str]
    than: dict[str, str]
    by: float = Field(0.0, ge=0)
    metric: str = "perplexity"
    text: str = ""


class TrainedTokenizer(_Strict):
    """A tokenizer that `tools/sweep.py` trains on `text` if `file` is missing."""

    file: str
    text: str
    size: int


class Paper(_Strict):
    """Where the paper's numbers are: a table of configs/paper/tables.json, and its corpus."""

    table: str
    corpus: str


class Description(_Strict):
    """The content of a grid file."""

    runs: str
    configs: list[str] = Field(min_length=1)
    axes: dict[str, list[str] | dict[str, Value | None]] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    lengths: list[int] = Field(min_length=1)
    variables: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    processes: int = Field(1, ge=1)
    tokenizer: TrainedTokenizer | None = None
    rows: str = ""
    compare: str = ""
    alpha: float = Field(0.05, gt=0, lt=1)
    endpoints: dict[str, Endpoint | list[Endpoint]] = {}
    paper: Paper | None = None


def values_of(about: Description, axis: str) -> dict[str, Value]:
    """Return a dict from each value's name on an axis to its configs, overrides and seeds."""
    given = about.axes[axis]
    if isinstance(given, list):
        return {name: Value() for name in given}
    return {name: value or Value() for name, value in given.items()}


def sides(endpoint: Endpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Return both sides of an endpoint, each with every axis and `length`."""
    return endpoint.of, endpoint.of | endpoint.than
