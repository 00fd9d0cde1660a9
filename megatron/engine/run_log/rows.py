"""Convert a step's metrics (numbers and nested lists of numbers) for the log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

from megatron.parallel.loss import perplexity

Metric = Any
"""A number, a tensor with one element, or a (nested) list of these."""


def plain(metric: Metric) -> Any:
    """Return the metric with its tensors converted to plain ints and floats."""
    return _mapped(lambda x: int(x) if isinstance(x, Integral) else float(x), metric)


def flat(name: str, metric: Metric) -> Iterator[tuple[str, Any]]:
    """Yield (name, number) for each number; those in lists have names such as `theta/bias_p/3`."""
    if not isinstance(metric, list):
        yield name, metric
        return
    for i, each in enumerate(metric):
        yield from flat(f"{name}/{i}", each)


def json_line(row: Mapping[str, Metric]) -> str:
    """Return the row as a line of JSON, with null for NaN and infinity."""
    finite = {
        name: _mapped(lambda x: x if math.isfinite(x) else None, metric)
        for name, metric in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def described(metrics: Mapping[str, float]) -> str:
    """Return metrics as a text such as `loss 1.5000, ppl 4.482; loss_at_256 1.4900, ppl 4.437`."""
    shown = []
    for path, value in metrics.items():
        name = path.rpartition("/")[2]
        ppl = f", ppl {perplexity(value):.3f}" if name.startswith("loss") else ""
        shown.append(f"{name} {value:.4f}{ppl}")
    return "; ".join(shown)


def perplexities(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexity of each loss: `validation/perplexity_at_64` of `loss_at_64`."""
    losses = {name: value for name, value in metrics.items() if "/loss" in name}
    return {name.replace("/loss", "/perplexity"): perplexity(x) for name, x in losses.items()}


def _mapped(change: Callable[[Any], Any], metric: Metric) -> Any:
    return [_mapped(change, x) for x in metric] if isinstance(metric, list) else change(metric)
