"""Compare published and hostile formulas with float64, in every backend that serves a CPU.

`tests/ptx/verify_formulas.py` compiles and executes all of them, and `test_ptx` two. Here Triton's
interpreter executes a few, because each takes half a second.
"""

from __future__ import annotations

import pytest
import torch

from megatron.attention import attend
from megatron.attention.fused import functions_of
from tests.kernels.cases import DEVICE, TOLERANCE, assert_close, make
from tests.kernels.formulas import NAMES, Formula, exact

TABULATED = {"saturating", "soft knee", "soft window"}
INTERPRETED = ("tie", "band of masks", "Huber", "steep", "soft knee")


def case_of(what: str, queries: int):
    case = make(Formula(what), 1, 2, queries, 8)
    case.inputs[3] = torch.tensor([[0.5, 0.75], [1.25, 0.41]], device=DEVICE).requires_grad_()
    return case, exact(what, case.inputs, case.grad, 0.35)


@pytest.mark.parametrize("what", NAMES)
def test_backends_of_torch(what):
    case, true = case_of(what, 40)
    assert_close(case.run("eager", torch.float64), true, 1e-12)
    for backend in ("eager", "blocked"):
        assert_close(case.run(backend), true, 5e-6)
    with torch.no_grad():
        options = {"scale": 0.35, "backend": "flex"}
        out = attend(*case.inputs[:3], case.pos, case.inputs[3], **options)
    assert_close([out], true[:1], 5e-6)


def test_what_is_evaluated_in_registers():
    ways = {what: functions_of(Formula(what))[1] for what in NAMES}
    assert len(ways) == 36
    assert {what for what, way in ways.items() if way != "evaluated in registers"} == TABULATED


@pytest.mark.parametrize("what", INTERPRETED if DEVICE == "cpu" else NAMES)
def test_fused(what):
    case, true = case_of(what, 24)
    assert_close(case.run("fused"), true, TOLERANCE[torch.float32])
