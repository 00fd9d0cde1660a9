"""Test edge cases of the fused kernels: theta's bounds, one key, memory layouts, autograd modes.

Shared by the interpreter's tests and those on a GPU; compared with float64 autograd.
"""

from __future__ import annotations

import pytest
import torch

from megatron.attention import AttentionError, Call, attend, choose
from megatron.positional import bounds, load, names
from tests.helpers.embeddings import ALIKE
from tests.kernels.cases import DEVICE, LENGTH, SIZE, TOLERANCE, assert_close, check, make

DISTANCE = [name for name in names() if load(name).kind == "distance" and name not in ALIKE]
LEARNABLE = [name for name in DISTANCE if load(name).learnable]
KINDS = ["kerple_log", "kerple_power_add_mul", "rpe", "none"]  # formulas, with a weight, a table


class EdgeCases:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("edge", ["low", "high"])
    @pytest.mark.parametrize("name", [name for name in LEARNABLE if name != "rpe"])
    def test_theta_at_its_bounds(self, name, edge, dtype):
        """If a column has no upper bound, 3 is used instead."""
        case = make(name, 1, 2, LENGTH, SIZE, dtype=dtype)
        bound = bounds(case.pos.parameters)[edge == "high"].clamp(max=3.0)
        case.inputs[3] = bound.expand(2, -1).clone().to(DEVICE).requires_grad_()
        check(case, scale=SIZE**-0.5)

    @pytest.mark.parametrize("name", DISTANCE)
    def test_the_diagonal_alone(self, name):
        """With a single key, d = 0: its weight is 1, and theta's gradient is 0, not NaN."""
        case = make(name, queries=1)
        out, *gradients = case.run("fused")
        torch.testing.assert_close(out, case.inputs[2])
        for gradient in (gradients[0], *gradients[3:]):
            assert gradient.abs().max() < 2e-5

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("name", KINDS)
    def test_the_layout_a_model_gives(self, name, dtype):
        """q, k and v may be slices of one projection's output, which are not contiguous."""
        case = make(name, 2, 3, LENGTH, SIZE)
        x = torch.randn(2, LENGTH, 3 * 3 * SIZE, device=DEVICE).to(dtype)
        grads = []
        for backend, wide in (("fused", dtype), ("eager", torch.float64)):
            leaf = x.to(wide, copy=True).requires_grad_()
            theta = [rows.detach().to(torch.float64).requires_grad_() for rows in case.inputs[3:]]
            q, k, v = leaf.unflatten(-1, (3, 3 * SIZE)).transpose(1, 2).chunk(3, dim=-1)
            options = {"scale": SIZE**-0.5, "backend": backend}
            out = attend(q, k, v, case.pos, *theta, **options).transpose(1, 2)
            assert backend == "eager" or out.is_contiguous()  # as the next projection wants it
            grad = case.grad.transpose(1, 2).to(wide)
            grads.append([out, *torch.autograd.grad(out, (leaf, *theta), grad)])
        assert_close(*grads, TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_any_strides_and_alignment(self, dtype):
        """Tensors may begin at an odd element, have gaps, repeat sequences or be transposed, and
        the output's gradient may be one expanded number."""
        case = make("kerple_log", 2, 2, LENGTH, SIZE, dtype=dtype)
        q, k, v, theta = (x.detach() for x in case.inputs)
        v = v[:1].expand_as(v)
        exact = [x.double().requires_grad_() for x in (q, k, v, theta)]
        odd = torch.empty(q.numel() + 1, device=DEVICE, dtype=dtype)[1:].view_as(q).copy_(q)
        apart = torch.stack((k, torch.full_like(k, torch.nan)), -1)[..., 0]
        inputs = [x.requires_grad_() for x in (odd, apart, v, theta.t().contiguous().t())]
        assert inputs[1].stride(-1) == 2 and inputs[2].stride(0) == 0 and inputs[3].stride(0) == 1
        results = []
        for tensors, backend in ((inputs, "fused"), (exact, "eager")):
            q, k, v, theta = tensors
            out = attend(q, k, v, case.pos, theta, scale=0.35, backend=backend)
            grad = torch.full((), 0.7, device=DEVICE, dtype=out.dtype).expand_as(out)
            results.append([out, *torch.autograd.grad(out, tensors, grad)])
        assert_close(*results, TOLERANCE[dtype])

    @pytest.mark.parametrize("name", KINDS)
    def test_later_keys_may_hold_anything(self, name):
        """NaN in the unused part of a cache does not affect the results."""
        offset, later = 21, 30
        case = make(name, 1, 2, 9, SIZE, keys=9 + offset + later)
        clean = case.run("fused", query_offset=offset)
        for x in case.inputs[1:3]:
            x.data[:, :, 9 + offset :] = torch.nan
        results = case.run("fused", query_offset=offset)
        assert all(torch.equal(x, y) for x, y in zip(results, clean, strict=True))
        assert all((x[:, :, 9 + offset :] == 0).all() for x in results[2:4])
        check(case, query_offset=offset)

    def test_large_scores_do_not_overflow(self):
        """One softmax weight is nearly 1, so in 16 bits theta's gradient is mostly rounding."""
        for dtype, tolerance in TOLERANCE.items():
            case = make("kerple_log", 1, 2, LENGTH, SIZE, dtype=dtype)
            case.inputs[0] = (case.inputs[0].detach() * 100).requires_grad_()
            got, exact = case.run("fused"), case.run("eager", torch.float64)
            assert all(x.isfinite().all() for x in got)
            if dtype == torch.float32:
                assert_close(got, exact, 1e-3)
            else:
                assert_close(got[:4], exact[:4], 2 * tolerance)

    def test_no_queries_are_refused_and_no_sequences_have_no_result(self):
        with pytest.raises(AttentionError, match="only the batch may be 0"):
            make("kerple_log", queries=0, keys=5).run("fused")
        assert make("kerple_log", batch=0).run("fused")[0].numel() == 0

    def test_some_inputs_without_gradient(self):
        for wanted in range(4):
            case = make("kerple_power_add_mul", 1, 2, 20, 8)
            full = case.run("fused")
            for n, x in enumerate(case.inputs):
                x.requires_grad_(n == wanted)
            inputs = (*case.inputs[:3], case.pos, case.inputs[3])
            out = attend(*inputs, scale=0.35, backend="fused")
            (only,) = torch.autograd.grad(out, case.inputs[wanted], case.grad)
            assert torch.equal(out, full[0])
            # With theta's gradient, the other gradients have no error from the output's rounding.
            torch.testing.assert_close(only, full[1 + wanted], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", KINDS)
    def test_ways_of_calling(self, name):
        """Calls without gradients, in inference mode, with two backward passes, under autocast."""
        case = make(name, 1, 2, 20, SIZE)
        full = case.run("fused")

        def call() -> torch.Tensor:
            inputs = (*case.inputs[:3], case.pos, *case.inputs[3:])
            return attend(*inputs, scale=0.35, backend="fused")

        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                out = call()
            assert torch.equal(out, full[0]) and not out.requires_grad
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = call()
            once = torch.autograd.grad(out, case.inputs, case.grad, retain_graph=True)
        twice = torch.autograd.grad(out, case.inputs, case.grad, create_graph=True)
        for gradients in (once, twice):
            assert all(torch.equal(x, y) for x, y in zip([out, *gradients], full, strict=True))
        for gradient in twice[: len(case.inputs)]:
            with pytest.raises(NotImplementedError, match="no second derivative: use"):
                torch.autograd.grad(gradient.sum(), case.inputs[0], retain_graph=True)

    @pytest.mark.parametrize("name", ["kerple_log", "rpe"])
    def test_in_a_compiled_model(self, name):
        """torch.compile keeps the call in the graph, between the code before and after it."""
        case, seen = make(name, 1, 2, 20, SIZE), []
        chosen = choose("fused", case.pos, device_type=DEVICE, dtype=torch.float32, head_size=SIZE)

        def function(q, k, v, theta):
            return (chosen(Call(q * 2, k, v, case.pos, theta, scale=0.35)) + 1) * 3

        def compiler(graph, inputs):
            seen.append(str(graph.graph))
            return graph.forward

        torch._dynamo.reset()
        results = []
        for call in (function, torch.compile(function, backend=compiler, fullgraph=True)):
            out = call(*case.inputs)
            results.append([out, *torch.autograd.grad(out, case.inputs, case.grad)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        (graph,) = seen
        assert all(operation in graph for operation in ("mul", "kerple.fused", "add"))

    def test_tensors_on_different_devices_are_refused(self):
        case = make("kerple_log")
        q, k, v, theta = case.inputs
        for inputs, message in (
            (
                (q, k.to("meta"), v, case.pos, theta),
                "k is on meta, but q on",
            ),
            ((q, k, v, case.pos, theta.to("meta")), "theta is on meta, but q on"),
        ):
            with pytest.raises(AttentionError, match=message):
                attend(*inputs, scale=0.35, backend="fused")
