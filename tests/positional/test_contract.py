"""Test the contract of positional embeddings for each file of `megatron/positional`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.attention import attend
from megatron.positional import PositionalEmbedding, PositionalError, bounds, load, names
from tests.positional.formulas64 import ENTRIES, position_of

DISTANCE = [name for name, entry in ENTRIES.items() if entry.kind == "distance"]
KERNELS = [(name, part) for name in DISTANCE for part in ("bias", "weight")]
KERNELS = [(name, part) for name, part in KERNELS if getattr(ENTRIES[name], part)]
DISTANCES = torch.tensor([*range(200), 255, 256, 257, 511, 1000, 16_383, 65_535, 2**22 + 1])
HEADS = 3


def draw_theta(name: str, seed: int = 0, heads: int = HEADS) -> torch.Tensor:
    """Draw float64 theta within its bounds, with the first head at the lower bounds and the second
    head at the upper ones. An absent upper bound counts as 2, an absent lower bound as 0 (slopes)
    or -2 (tables); of many hidden units, which add up, as 0.4 and -0.4."""
    columns, most = ENTRIES[name].columns, 0.4 if name == "fire" else 2.0
    low = np.maximum([column.low for column in columns], 0.0 if ENTRIES[name].cpd else -most)
    high = np.minimum([column.high for column in columns], most)
    theta = np.random.default_rng(seed).uniform(low, high, (heads, len(columns)))
    theta[0], theta[1] = low, high
    return torch.from_numpy(theta)


def value(pos: PositionalEmbedding, part: str, theta: torch.Tensor, d: torch.Tensor):
    """Compute b or w at the distances d, of queries at the positions `position_of(d)`."""
    return pos.bias_at(theta, d, position_of(d)) if part == "bias" else pos.weight(theta, d)


def rebuilt(name: str, part: str, theta: torch.Tensor, d: torch.Tensor) -> np.ndarray:
    """Compute b or w [heads, distances] by the independent formula of `formulas64`."""
    formula = getattr(ENTRIES[name], part)
    with np.errstate(under="ignore"):
        return np.stack([formula(row, d.double().numpy()) for row in theta.double().numpy()])


def test_every_file_has_an_entry_and_every_entry_a_file():
    missing, stale = set(names()) - set(ENTRIES), set(ENTRIES) - set(names())
    assert not missing, (
        f"no independent formula for {sorted(missing)}: add an Entry to ENTRIES in "
        "tests/positional/formulas64.py (kind, columns with bounds and first values, b and w)"
    )
    assert not stale, f"ENTRIES in tests/positional/formulas64.py has {sorted(stale)}, without file"


@pytest.mark.parametrize("name", ENTRIES)
def test_declaration(name):
    pos, entry = load(name), ENTRIES[name]
    assert (pos.name, pos.kind, pos.learnable) == (name, entry.kind, entry.learnable)
    assert [p.name for p in pos.parameters] == [c.name for c in entry.columns]
    low, high = bounds(pos.parameters)
    assert low.dtype == high.dtype == torch.float32
    torch.testing.assert_close(low, torch.tensor([c.low for c in entry.columns]).float())
    torch.testing.assert_close(high, torch.tensor([c.high for c in entry.columns]).float())
    theta = draw_theta(name) if entry.columns else torch.zeros(HEADS, 0)
    for part in ("bias", "weight"):
        assert (value(pos, part, theta, DISTANCES) is None) == (getattr(entry, part) is None)


@pytest.mark.parametrize("name,part", KERNELS)
def test_formula(name, part):
    pos, theta = load(name), draw_theta(name)
    exact = rebuilt(name, part, theta, DISTANCES)
    got = value(pos, part, theta, DISTANCES)
    assert got.dtype == torch.float64 and got.shape == (HEADS, len(DISTANCES))
    np.testing.assert_allclose(got.numpy(), exact, rtol=1e-12, atol=1e-300)
    # Distances of any shape and floating dtype, as a matrix for example.
    matrix = value(pos, part, theta, DISTANCES.double().view(4, -1))
    assert torch.equal(matrix.flatten(1), got)


@pytest.mark.parametrize("name,part", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula_in_single_precision_whatever_thetas_dtype(name, part, dtype):
    """bf16 theta is converted to fp32; distances above 256, which bf16 rounds, stay exact."""
    theta = draw_theta(name).to(dtype)
    got = value(load(name), part, theta, DISTANCES)
    assert got.dtype == torch.float32
    exact = rebuilt(name, part, theta, DISTANCES)
    # exp(-x) turns x's relative rounding into an absolute one: allow |x| times as much.
    slack = 1.0 + np.abs(np.log(np.maximum(exact, 1e-38))) if part == "weight" else 1.0
    least = 1e-5 if name == "fire" else 1e-37  # of a sum of 32 numbers with either sign
    assert (np.abs(got.double().numpy() - exact) <= 1e-6 * np.abs(exact) * slack + least).all()


@pytest.mark.parametrize("name,part", KERNELS)
def test_gradient_by_theta(name, part):
    """Compare autograd with central differences of the independent formula, in float64."""
    theta = draw_theta(name, seed=1).requires_grad_()
    d = torch.tensor([0, 1, 2, 3, 7, 20, 100, 513])
    coefficients = torch.from_numpy(np.random.default_rng(2).normal(size=(HEADS, len(d))))
    (gradient,) = torch.autograd.grad(value(load(name), part, theta, d), theta, coefficients)
    step, values = 1e-6, theta.detach()
    for head in range(HEADS):
        for column in range(values.shape[1]):
            shift = torch.zeros_like(values)
            shift[head, column] = step
            up, down = (rebuilt(name, part, values + sign * shift, d) for sign in (1, -1))
            expected = (coefficients.numpy() * (up - down)).sum() / (2 * step)
            scale = 1.0 + np.abs(up).max()
            assert abs(gradient[head, column].item() - expected) < 1e-6 * scale


@pytest.mark.parametrize("name,part", KERNELS)
def test_distance_zero_is_neutral_and_without_gradient(name, part):
    """For any theta b(0) = 0 and w(0) = 1, and the gradient of d^p is 0, not 0 log 0 = NaN."""
    if name == "rpe":  # its bucket 0 is a free number: the value is that number, the gradient 1
        theta = draw_theta(name).float().requires_grad_()
        (here := load(name).bias(theta, torch.tensor([0]))).sum().backward()
        assert torch.equal(here[:, 0], theta[:, 0])
        assert torch.equal(theta.grad, torch.eye(32)[:1].expand(HEADS, -1))
        return
    theta = draw_theta(name).float().requires_grad_()
    here = value(load(name), part, theta, torch.tensor([0]))
    here.sum().backward()
    if name == "fire":  # the constant sum_k v_k relu(b_k), which the softmax cancels
        b, v = theta[:, 34:66], theta[:, 66:]
        torch.testing.assert_close(here[:, 0], (v * b.relu()).sum(1))
        assert torch.equal(theta.grad[:, :34], torch.zeros(HEADS, 34))
        return
    if name == "bam":  # its location is a free number
        alpha, beta, mu = theta.unbind(1)
        expected = -alpha.exp() * (2 * mu.sinh().abs() + 1e-5) ** beta
        torch.testing.assert_close(here[:, 0], expected)
        assert theta.grad.isfinite().all()
        return
    assert torch.equal(here, torch.full((HEADS, 1), 0.0 if part == "bias" else 1.0))
    assert torch.equal(theta.grad, torch.zeros_like(theta))


class Shifted(PositionalEmbedding):
    """An embedding whose bias is that of another one plus a constant."""

    kind = "distance"

    def __init__(self, pos: PositionalEmbedding, constant: float):
        self.inner, self.constant, self.parameters = pos, constant, pos.parameters
        self.reads_position = pos.reads_position

    def bias(self, theta, d, i=None):
        bias = self.inner.bias_at(theta, d, i)
        zeros = theta.new_zeros(len(theta), *d.shape)
        return (zeros if bias is None else bias) + self.constant

    def weight(self, theta, d):
        return self.inner.weight(theta, d)


def random_inputs(length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = 2, HEADS, length, 8
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("name", DISTANCE)
def test_softmax_absorbs_a_constant(name, backend):
    pos, theta, qkv = load(name), draw_theta(name), random_inputs(70)
    plain = attend(*qkv, pos, theta, scale=0.3, backend=backend)
    for constant in (-7.0, 300.0):
        shifted = attend(*qkv, Shifted(pos, constant), theta, scale=0.3, backend=backend)
        torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-12)


def attention_of(name: str, qkv: list[torch.Tensor], backend: str) -> torch.Tensor:
    """Compute attention with this embedding as a model does."""
    pos, (q, k, v) = load(name), qkv
    if pos.kind == "rotary":
        q, k = pos.rotate(q, k, offset=0, rotary_ndims=8, base=10000)
    theta = draw_theta(name) if pos.parameters else None
    decay = pos.decay(q.sum(-1)) if pos.kind == "gate" else None
    if pos.kind == "input" and not pos.learnable:
        table = pos.table(torch.arange(q.shape[2]), 8)
        q, k, v = q + table, k + table, v + table
    return attend(q, k, v, pos, theta, scale=0.3, backend=backend, decay_BHS=decay)


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("name", sorted(set(ENTRIES) - {"sink", "forget_gate"}))
def test_causality(name, backend):
    """Changing keys and values from position 41 on changes no bit of the outputs 0 ... 40."""
    before, (_, k, v) = random_inputs(90), random_inputs(90, seed=1)
    after = [x.clone() for x in before]
    after[1][:, :, 41:], after[2][:, :, 41:] = k[:, :, 41:], 1e6 * v[:, :, 41:]
    old, new = (attention_of(name, qkv, backend) for qkv in (before, after))
    assert torch.equal(old[:, :, :41], new[:, :, :41])
    assert (old[:, :, 41:] != new[:, :, 41:]).any(-1).all()


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.columns])
def test_initial_theta(name):
    pos, entry = load(name), ENTRIES[name]
    heads = 3000
    theta = pos.initial_theta(heads, torch.Generator().manual_seed(7))
    assert theta.shape == (heads, len(entry.columns)) and theta.dtype == torch.float32
    low, high = bounds(pos.parameters)
    assert ((theta >= low) & (theta <= high)).all()
    if entry.initial is not None:
        for n in (*range(1, 26), 32, 40, 64):
            exact = torch.from_numpy(entry.initial(n)).float()
            assert torch.equal(pos.initial_theta(n), exact)
        return
    if name == "fire":
        shared, units = theta[:, :66], theta[:, 66:] * 32**0.5
        assert torch.equal(shared, shared[:1].expand(heads, -1))
        assert shared[0, :2].tolist() == [torch.tensor(0.1).item(), 1.0]
        assert [p.shared for p in pos.parameters] == [True] * 66 + [False] * 32
        for drawn in (shared[0, 2:34], shared[0, 34:], units):  # U(-1, 1)
            assert -1 <= drawn.min() < -0.8 and 0.8 < drawn.max() <= 1
        assert units.mean().abs() < 0.01 and abs(units.std() - 1 / 3**0.5) < 0.01
        return
    again, other = (pos.initial_theta(heads, torch.Generator().manual_seed(s)) for s in (7, 8))
    assert torch.equal(theta, again) and not torch.equal(theta, other)
    assert theta.is_contiguous() and len(theta.unique()) > 0.9 * theta.numel()
    for column, values in zip(entry.columns, theta.T, strict=True):
        if column.top is not None:
            at_bound = (values == np.float32(column.low)).float().mean().item()
            assert 0 < at_bound < 3 * column.low / column.top
            # U(0, top): quartiles at a quarter, half and three quarters; 4 sigma of 3000 draws
            quartiles = values.quantile(torch.tensor([0.25, 0.5, 0.75])) / column.top
            assert (quartiles - torch.tensor([0.25, 0.5, 0.75])).abs().max() < 0.04
            assert 0.99 * column.top < values.max() < column.top
    if name == "rpe":
        few = [pos.initial_theta(12, torch.Generator().manual_seed(s)) for s in range(60)]
        std = (2.0 / (32 + 12)) ** 0.5  # Xavier-normal of a [32, 12] table
        assert abs(torch.stack(few).std().item() / std - 1) < 0.02
        assert abs(torch.stack(few).mean().item()) < 0.02


@pytest.mark.parametrize("name", ENTRIES)
def test_scaled_distances_or_a_refusal(name):
    """b and w at a distance d are those of the embedding at half of it, exactly."""
    pos = load(name)
    if name == "rpe" or pos.kind not in ("distance", "rotary"):
        with pytest.raises(PositionalError, match=f"^{name}.* (no distance|cannot be scaled)"):
            pos.scaled(0.5)
        return
    half, theta = pos.scaled(0.5), draw_theta(name) if ENTRIES[name].columns else None
    for part in ("bias", "weight") if pos.kind == "distance" else ():
        exact = value(pos, part, theta, DISTANCES)
        if part == "bias":
            got = half.bias_at(theta, 2 * DISTANCES, 2 * position_of(DISTANCES))
        else:
            got = half.weight(theta, 2 * DISTANCES)
        assert got is exact is None or torch.equal(got, exact)
    if pos.kind == "rotary":
        x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
        for turned, whole in zip(
            half.rotate(x, x), pos.rotate(x[:, :, ::2], x[:, :, ::2]), strict=True
        ):
            assert torch.equal(turned[:, :, ::2], whole)
    assert half.name == pos.name and pos.distance_scale == 1.0


@pytest.mark.parametrize("backend", ["blocked", "sdpa", "flex"])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "alibi"])
def test_every_backend_scales_distances(name, backend):
    pos = load(name).scaled(0.37)
    theta = draw_theta(name)
    q, k, v = (torch.randn(2, HEADS, 21, 8, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        exact = attend(q, k, v, pos, theta, scale=0.35, backend="eager")
        got = attend(q, k, v, pos, theta, scale=0.35, backend=backend)
        plain = attend(q, k, v, load(name), theta, scale=0.35, backend="eager")
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    assert (plain - exact).abs().max() > 1e-4
