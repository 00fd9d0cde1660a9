"""Test a training step of the whole model on a GPU in bf16, with `fused` and with `eager`.

Both are compared with float64. The rest of the model rounds equally in both, so the difference of
their errors is caused by `fused`.
"""

from __future__ import annotations

import pytest
import torch

from megatron.attention import choose
from megatron.kernels.launch import LAUNCHES
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.positional import load
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LAYERS, HEADS, HIDDEN, LENGTH, VOCABULARY = 3, 4, 256, 200, 320


def model_of(name: str, backend: str, dtype: torch.dtype, recompute: bool = False) -> GPT:
    pos = load(name)
    attend = choose(backend, pos, device_type=DEVICE, dtype=dtype, head_size=HIDDEN // HEADS)
    block = BlockShape(hidden_size=HIDDEN, num_heads=HEADS)
    shape = GPTShape(LAYERS, VOCABULARY, block, LENGTH, checkpoint_activations=recompute)
    return GPT(Plan(shape, pos, attend, seed=5)).to(DEVICE, dtype)


def step(model: GPT) -> tuple[float, dict[str, torch.Tensor]]:
    """Return (mean loss, gradient of each parameter, converted to float64)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator).to(DEVICE)
    loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "name", ["kerple_log", "kerple_power_add_mul", "rpe", "rotary", "alibi", "learned"]
)
def test_a_step_is_as_exact_as_eager(name):
    exact_model = model_of(name, "eager", torch.float64)
    models = {backend: model_of(name, backend, BF16) for backend in ("eager", "fused")}
    with torch.no_grad():  # from the same weights, those of bf16
        for p, rounded in zip(exact_model.parameters(), models["eager"].parameters(), strict=True):
            p.copy_(rounded)
    exact_loss, exact = step(exact_model)
    before = LAUNCHES.copy()
    found = {backend: step(model) for backend, model in models.items()}
    launched = LAUNCHES - before
    passes = {"forward": LAYERS, "query": LAYERS, "key": LAYERS}
    assert launched == passes | ({"table": LAYERS} if name == "rpe" else {})
    assert abs(found["fused"][0] - exact_loss) < 5e-3
    for parameter, true in exact.items():
        errors = {
            backend: ((gradients[parameter] - true).norm() / true.norm().clamp(min=1e-12)).item()
            for backend, (_, gradients) in found.items()
        }
        assert errors["fused"] < 2 * errors["eager"] + 0.02, f"{parameter}: {errors}"


def test_activation_checkpointing_changes_nothing():
    results = [step(model_of("kerple_log", "fused", BF16, recompute)) for recompute in (0, 1)]
    (loss, gradients), (other_loss, other) = results
    assert loss == other_loss
    assert all(torch.equal(gradients[name], other[name]) for name in gradients)


def test_a_few_steps_learn_the_same():
    """With AdamW on one batch, the losses with `fused` and `eager` fall equally."""
    losses = {}
    for backend in ("eager", "fused"):
        model = model_of("kerple_log", backend, BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[backend] = []
        for _ in range(20):
            optimizer.zero_grad()
            losses[backend].append(step(model)[0])
            optimizer.step()
    assert losses["fused"][-1] < losses["fused"][0] - 0.5
    assert losses["fused"] == pytest.approx(losses["eager"], abs=0.1)
