"""Define the schema of a grid file, whose texts may contain variables such as `{model}`.

A grid file describes a set of training runs.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

METRICS = {"perplexity": True, "loss": True, "bits_per_byte": True, "exact": False, "token": False}
"""Maps each metric (a column of a results file) to whether lower values are better.

Metrics with True are positive and are compared as ratios. Metrics with False are shares of right
answers and are compared as differences.
"""
BEST = "best"
COLUMNS = ["cell", "seed", "folder", "length", "metric", "value"]
"""The columns of a table of results. The table also has one column for each axis of the grid."""
OTHER_COLUMNS = {
    "seeds", "parameter", "step", "start", "end", "change", "relative", "state", "why", "seconds",
    "host", "text_fingerprint", "megatron", "python", "torch", "deepspeed", "numpy",
}  # fmt: skip
"""The other columns of `cells.csv` and `theta.csv`, which have a column for each axis, too."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Value(_Strict):
    """The configs, overrides and seeds of the runs with one value on an axis of a grid.

    An axis is a setting that differs between the runs of a grid.

    Attributes:
        configs: Config files to add to the grid's config files.
        overrides: Config keys to add to the grid's overrides.
        seeds: The seeds of the runs with this value. If the list is empty, the runs have the grid's
            seeds.
    """

    configs: list[str] = []
    overrides: dict[str, Any] = {}
    seeds: list[int] = []


class Endpoint(_Strict):
    """A claim that compares a metric of two sides, to be tested over seeds.

    Attributes:
        claim: The kind of claim, such as `below`.
        of: The first side: a value for each setting that differs between runs, and a `length`.
        than: The second side. It needs only the entries that differ from those of `of`.
        by: The margin of the claim, in percent. For shares of right answers, it is in percentage
            points.
        relative_to: If not empty, the claim compares how much each side differs from its reference.
            The reference is the same side, but with the entries given here.
        metric: The name of the metric.
        text: The claim in words, for reports. If the text is empty, the words are generated.
    """

    # `experiments/claims.py` defines each kind of claim. `length: best` in a side selects the
    # length at which the side's mean over seeds is best. `relative_to: {length: 128}` compares the
    # changes from length 128 to a side's length.

    claim: Literal["below", "above", "within", "equal", "differs"]
    of: dict[str, str]
    than: dict[str, str]
    by: float = Field(0.0, ge=0)
    relative_to: dict[str, str] = {}
    metric: str = "perplexity"
    text: str = ""


class TrainedTokenizer(_Strict):
    """A tokenizer that `tools/sweep.py` trains on `text` if `file` is missing.

    Attributes:
        file: The path of the tokenizer's file.
        text: A text file, a folder of text files, or a builtin corpus.
        size: The number of tokens in the vocabulary.
    """

    file: str
    text: str
    size: int


class Paper(_Strict):
    """The results in the paper with which a report compares the results of the grid.

    Attributes:
        table: The name of a table in configs/paper/tables.json.
        corpus: The name of a corpus in that table.
    """

    table: str
    corpus: str


class Description(_Strict):
    """The content of a grid file. A report on the runs shows `title` and `question`."""

    title: str = ""
    question: str = ""
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
    endpoints: dict[str, Endpoint | Annotated[list[Endpoint], Field(min_length=1)]] = {}
    paper: Paper | None = None


def values_of(about: Description, axis: str) -> dict[str, Value]:
    """Return the values of an axis, as a dict from the name of each value to its settings."""
    given = about.axes[axis]
    if isinstance(given, list):
        return {name: Value() for name in given}
    return {name: value or Value() for name, value in given.items()}


def sides(endpoint: Endpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Return the two sides of a claim, each as a dict from setting (or `length`) to value."""
    return endpoint.of, endpoint.of | endpoint.than
