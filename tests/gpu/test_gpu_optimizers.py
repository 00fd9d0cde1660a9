"""Test Muon, and NVIDIA's apex if it is installed, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

pytest.importorskip("pydantic", reason="needs requirements.txt: it imports the engine")
pytest.importorskip("deepspeed", reason="needs requirements.txt: it imports the engine")

from megatron import nvidia_apex  # noqa: E402
from megatron.config.sections.training import OptimizerConfig  # noqa: E402
from megatron.engine.training.muon import MuonWithAdamW  # noqa: E402
from megatron.engine.training.optimizer import APEX_ADAM, build_optimizer  # noqa: E402
from megatron.model import BlockShape  # noqa: E402
from megatron.model.block_norm import BlockNorm  # noqa: E402

needs_apex = pytest.mark.skipif(
    nvidia_apex.find(*APEX_ADAM)[0] is None, reason="needs NVIDIA's apex (docs/gpu.md)"
)


@needs_apex
def test_on_a_gpu_apex_steps_as_torch():
    weights = {}
    for kind in ("apex", "adam"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 999, device="cuda"))
        group = {"params": [weight], "weight_decay": 0.1}
        optimizer = build_optimizer(kind, [group], OptimizerConfig(lr=0.01, betas=(0.9, 0.95)))
        for step in range(5):
            weight.grad = (weight.detach() + step).sin()
            optimizer.step()
        weights[kind] = weight.detach()
    torch.testing.assert_close(weights["apex"], weights["adam"], rtol=1e-5, atol=1e-6)


@needs_apex
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_on_a_gpu_apex_norms_are_the_formulas(norm, dtype):
    shape = BlockShape(hidden_size=256, num_heads=2, norm=norm, norm_eps=1e-5, fused_norm=True)
    layer = BlockNorm(shape).to("cuda", dtype)
    assert layer.kernel is not None
    x = torch.randn(64, 256, device="cuda", dtype=dtype, requires_grad=True)
    ours = layer(x)
    (ours_grad,) = torch.autograd.grad(ours.float().square().sum(), x)
    wide = x.detach().double().requires_grad_()
    norms = {"layernorm": F.layer_norm, "rmsnorm": F.rms_norm}
    theirs = norms[norm](wide, (256,), eps=1e-5)
    (theirs_grad,) = torch.autograd.grad(theirs.square().sum(), wide)
    scale = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), theirs, rtol=scale, atol=scale)
    torch.testing.assert_close(ours_grad.double(), theirs_grad, rtol=scale * 10, atol=scale * 10)


def test_on_a_gpu_muon_is_the_same_on_slices():
    results = []
    for flat in (False, True):
        other = torch.nn.Parameter(torch.ones(3, device="cuda"))
        matrix = torch.nn.Parameter(torch.ones(64, 32, device="cuda"))
        groups = [
            {"params": [other], "muon": False, "name": "decayed", "weight_decay": 0.1},
            {"params": [matrix], "muon": True, "name": "hidden", "weight_decay": 0.1},
        ]
        alone = SimpleNamespace(replica_rank=0, replica_size=1)
        optimizer = MuonWithAdamW(
            groups, lr=0.1, betas=(0.9, 0.9), eps=1e-8, momentum=0.9, split_fused=True, ranks=alone
        )
        if flat:
            matrix = torch.nn.Parameter(matrix.detach().flatten())
            optimizer.param_groups[1]["params"] = [matrix]
        gradient = torch.linspace(-1, 1, 2048, device="cuda").sin()
        matrix.grad, other.grad = gradient.view(matrix.shape), torch.ones_like(other)
        optimizer.step()
        results.append(matrix.detach().flatten())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
