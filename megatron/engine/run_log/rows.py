"""Convert metrics to rows of `metrics.jsonl`, and choose the rows that a resumed run keeps.

Metrics are numbers and nested lists of numbers.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from megatron.files import read_small, write_text
from megatron.parallel.loss import perplexity
from megatron.run_folder import MOST_BYTES, metrics_row

Metric = Any
"""A number, a tensor with one element, or a (nested) list of these."""


def plain(metric: Metric) -> Any:
    """Return the metric with its tensors converted to plain ints and floats."""
    return _mapped(lambda x: int(x) if isinstance(x, Integral) else float(x), metric)


def flat(name: str, metric: Metric) -> Iterator[tuple[str, Any]]:
    """Yield (name, number) for each number in `metric`.

    The name of a number in a list ends with its index, as in `theta/bias_p/3`.
    """
    if not isinstance(metric, list):
        yield name, metric
        return
    for i, each in enumerate(metric):
        yield from flat(f"{name}/{i}", each)


def json_line(row: Mapping[str, Metric]) -> str:
    """Return the row as a line of JSON, with null for NaN and infinity."""
    finite = {
        name: _mapped(lambda x: x if isinstance(x, str) or math.isfinite(x) else None, metric)
        for name, metric in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def described(metrics: Mapping[str, float]) -> str:
    """Return the metrics as text, with the perplexity after each loss.

    For example, the text is `loss 1.5000, ppl 4.482; loss_at_256 1.4900, ppl 4.437`.
    """
    shown = []
    for path, value in metrics.items():
        name = path.rpartition("/")[2]
        ppl = f", ppl {perplexity(value):.3f}" if name.startswith("loss") else ""
        shown.append(f"{name} {value:.4f}{ppl}")
    return "; ".join(shown)


def perplexities(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a dict with the perplexity for each loss in `metrics`."""
    # For example, `validation/perplexity_at_64` is the perplexity for `validation/loss_at_64`.
    losses = {name: value for name, value in metrics.items() if "/loss" in name}
    return {name.replace("/loss", "/perplexity"): perplexity(x) for name, x in losses.items()}


def _mapped(change: Callable[[Any], Any], metric: Metric) -> Any:
    return [_mapped(change, x) for x in metric] if isinstance(metric, list) else change(metric)


def keep_complete_rows(path: Path, last_step: int, validated_again: int | None = None) -> None:
    """Remove the rows of a log file that are incomplete or that a resumed run writes again.

    Args:
        path: The file of metrics.
        last_step: The step from which the run resumes.
        validated_again: The step whose validation the resumed run repeats, or None.
    """
    # A resumed run writes three kinds of rows again: rows of steps after `last_step`, rows with
    # final results, and the row with the validation loss of step `validated_again`. The file is
    # replaced atomically.
    if not path.exists():
        return
    text = read_small(path, MOST_BYTES).decode("utf-8", "replace")
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]  # not a whole line, or ""
    kept = "".join(line for line in lines if is_kept(line, last_step, validated_again))
    if kept != text:
        write_text(path, kept)


def is_kept(text: str, last_step: int, validated_again: int | None) -> bool:
    """Return whether a line of metrics is kept when the run resumes from `last_step`."""
    row = metrics_row(text) if text.endswith("\n") else None
    if row is None or any(name.startswith("final/") for name in row):  # measured again at the end
        return False
    if row["step"] == validated_again and any(name.startswith("validation/") for name in row):
        return False
    return row["step"] <= last_step
