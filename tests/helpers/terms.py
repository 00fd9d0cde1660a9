"""Attention calls with any subset of the terms that a call may have beside plain attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.attention import attend
from megatron.positional import load, names

POS_TERMS = {
    "bias": "kerple_log",
    "weight": "kerple_power_mul",
    "temperature": "log_n",
    "sink": "sink",
}
TERMS = (*POS_TERMS, "decay", "documents", "window")
OTHERS = {"table": "rpe"}  # what the fused backend tabulates; no term of its own
OTHERS |= {name: name for name in names()}
OTHERS["tempered bias"] = "log_n"  # t (s + b)


class Case:
    """Random inputs of a call with some of `TERMS` or embeddings, in float64.

    Args:
        later: The number of keys after the last query.
        group: The number of query heads that share a key head.

    Attributes:
        inputs: The tensors q, k, v, theta and the decay, if there are any. They require gradients.
        grad: The gradient of the output.
        options: The other arguments of `attend`.
    """

    def __init__(
        self, terms, batch=2, heads=2, queries=37, offset=0, *, size=5, later=0, group=1, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        keys = offset + queries + later
        known = POS_TERMS | OTHERS
        name = " + ".join(known[term] for term in terms if term in known) or "none"
        options: dict[str, Any] = {}
        if "tempered bias" in terms:
            options = {"log_n": {"temper_bias": True}} if "+" in name else {"temper_bias": True}
        self.pos = load(name, **options)
        inputs = [draw(batch, heads, queries, size)]
        inputs += [draw(batch, heads // group, keys, size) for _ in range(2)]
        self.options: dict[str, Any] = {"scale": 0.35, "query_offset": offset}
        if columns := len(self.pos.parameters):
            inputs.append(0.1 + torch.rand(heads, columns, generator=generator).double())
        if "decay" in terms or self.pos.has("gate"):
            inputs.append(draw(batch, heads, keys).cumsum(-1))
        if "documents" in terms:
            begins_BS = torch.rand(batch, keys, generator=generator) < 3 / keys
            self.options["starts_BS"] = (begins_BS * torch.arange(keys)).cummax(-1).values
        if "window" in terms:
            self.options["window"] = keys // 4
        self.inputs = [x.requires_grad_() for x in inputs]
        self.grad = draw(batch, heads, queries, size)

    def out(self, backend: str, inputs: list[Tensor], **options: Any) -> Tensor:
        """Return the output for other `inputs`."""
        (q, k, v), rest = inputs[:3], list(inputs[3:])
        theta = rest.pop(0) if self.pos.parameters else None
        options = self.options | ({"decay_BHS": rest.pop()} if rest else {}) | options
        return attend(q, k, v, self.pos, theta, backend=backend, **options)

    def rounded(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the inputs with q, k and v in `dtype`."""
        qkv = [x.detach().to(dtype).requires_grad_() for x in self.inputs[:3]]
        return [*qkv, *self.inputs[3:]]

    def run(self, backend: str, inputs: list[Tensor] | None = None, **options: Any) -> list[Tensor]:
        """Return the output and the gradient of each input."""
        inputs = inputs or self.inputs
        out = self.out(backend, inputs, **options)
        return [out, *torch.autograd.grad(out, inputs, self.grad.to(out.dtype))]


def assert_same(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).abs().max() <= tolerance * max(1.0, y.abs().max().item())
