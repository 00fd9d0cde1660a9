"""Test bitwise repetition, dropout, and which Triton kernels are launched.

Shared by the interpreter's tests and those on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import attend, cache_launches
from megatron.attention.fused import functions_of
from megatron.kernels.launch import LAUNCHES, Setting, forward
from megatron.kernels.tile_sizes import Tile, TileSizes
from megatron.positional import load
from tests.helpers.embeddings import ALIKE, PLAIN
from tests.kernels.cases import DEVICE, TOLERANCE, assert_close, make


class RepeatableCases:
    @pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe", "none"])
    @pytest.mark.parametrize("dropout_p", [0.0, 0.2])
    def test_repeated_bit_for_bit(self, name, dropout_p):
        case = make(name, 1, 2, 40, 16)
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append(case.run("fused", dropout_p=dropout_p))
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))

    @pytest.mark.parametrize("name", ["kerple_log", "kerple_power_mul", "rpe", "none"])
    def test_dropout_against_an_explicit_mask(self, name):
        """With v = identity, the output shows the mask; autograd with it is the reference."""
        length, keep = 40, 0.8
        case = make(name, 2, 2, length, length)
        identity = torch.eye(length, device=DEVICE).expand(2, 2, -1, -1)

        def dropped(v: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(1)
            inputs = [*case.inputs[:2], v, case.pos, *case.inputs[3:]]
            return attend(*inputs, scale=0.35, dropout_p=1.0 - keep, backend="fused")

        out = dropped(case.inputs[2])
        wanted = [x for x in case.inputs if x.requires_grad]
        got = [out, *torch.autograd.grad(out, wanted, case.grad)]
        with torch.no_grad():
            shown = dropped(identity)
        exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in case.inputs]
        eye = identity.double()
        probs = attend(
            *(*exact_inputs[:2], eye, case.pos, *exact_inputs[3:]), scale=0.35, backend="eager"
        )
        mask = (shown != 0) / keep
        seen = torch.ones(length, length, device=DEVICE).tril().bool()
        share = (mask[..., seen] > 0).double().mean().item()
        assert abs(share - keep) < 0.02  # 3280 draws: a standard deviation of 0.007
        assert not torch.equal(mask[0], mask[1]) and not torch.equal(mask[0, 0], mask[0, 1])
        exact_out = (probs * mask) @ exact_inputs[2]
        exact_wanted = [x for x in exact_inputs if x.requires_grad]
        exact = [exact_out, *torch.autograd.grad(exact_out, exact_wanted, case.grad.double())]
        assert_close(got, exact, TOLERANCE[torch.float32])

    def test_the_mask_does_not_depend_on_the_tiling(self):
        """Forward and backward have different tiles, and must drop the same weights."""
        case = make("kerple_log", 1, 2, 40, 48)
        q, k, _, theta = (x.detach() for x in case.inputs)
        v = torch.eye(40, 48, device=DEVICE).expand(1, 2, -1, -1)
        seed = torch.tensor([12345], device=DEVICE)
        masks = []
        for M, N in ((16, 16), (16, 64), (64, 32)):
            tiles = TileSizes(*[Tile(M, N, 4, 1)] * 4)
            setting = Setting(functions_of(case.pos)[0], 0.35, 0, 0.5, tiles)
            masks.append(forward(q, k, v, theta, seed, setting)[0] != 0)
        assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])

    def test_another_seed_another_mask(self):
        case = make("none", 1, 1, 30, 16)
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(case.run("fused", dropout_p=0.5)[0])
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_dropout_under_activation_checkpointing(self, reentrant):
        """The recomputed forward pass draws the same seed, so both masks are the same."""
        case = make("kerple_log", 1, 2, 30, 16)

        def function(*tensors):
            options = {"scale": 0.35, "dropout_p": 0.3, "backend": "fused"}
            return attend(*tensors[:3], case.pos, tensors[3], **options)

        results = []
        for call in (function, lambda *x: checkpoint(function, *x, use_reentrant=reentrant)):
            for x in case.inputs:
                x.grad = None
            torch.manual_seed(11)
            out = call(*case.inputs)
            torch.rand(3, device=DEVICE)
            out.backward(case.grad)  # what a reentrant checkpoint wants
            results.append([out, *(x.grad for x in case.inputs)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    @pytest.mark.parametrize("name", ["kerple_log", "rpe"])
    def test_cached_launches_give_the_same_bits(self, name):
        case, runs = make(name, 1, 2, 20, 16), []
        before = LAUNCHES["forward"]
        for cached in (False, True, True):
            cache_launches(cached)
            torch.manual_seed(3)
            runs.append(case.run("fused", dropout_p=0.2))
        cache_launches(False)
        for run in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
        assert LAUNCHES["forward"] == before + 3

    @pytest.mark.parametrize("name", [name for name in PLAIN if name not in ALIKE])
    def test_launches(self, name):
        """One kernel runs forward and two run backward, or three for a table with a gradient."""
        case = make(name, 1, 1, 20, 8)
        before = LAUNCHES.copy()
        case.run("fused")
        expected = {"forward": 1, "query": 1, "key": 1}
        if functions_of(case.pos)[0].tabulated and case.pos.learnable:
            expected["table"] = 1
        assert LAUNCHES - before == expected
        assert functions_of(load("kerple_log"))[0].tabulated is False
        before = LAUNCHES.copy()
        with torch.no_grad():
            attend(*case.inputs[:3], case.pos, *case.inputs[3:], scale=0.35, backend="fused")
        assert LAUNCHES - before == {"forward": 1}
