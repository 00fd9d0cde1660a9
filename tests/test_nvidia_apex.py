"""Test how NVIDIA's apex is found, and what replaces it; made-up modules stand in for it."""

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron import nvidia_apex
from megatron.config.sections.training import OptimizerConfig
from megatron.engine.training.optimizer import APEX_ADAM, build_optimizer, optimizer_kind
from megatron.model import BlockShape
from megatron.model.block_norm import BlockNorm, apex_norm
from tests.helpers.jobs import rows, write_run_config, write_shards
from tests.helpers.launch import call


class FusedAdam(torch.optim.AdamW):
    """Apex's constructor, and torch's computation."""

    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, lr=lr, betas=betas, eps=eps)


def layer_norm(x, weight, bias, shape, eps):
    return F.layer_norm(x, shape, weight, bias, eps)


def rms_norm(x, weight, shape, eps):
    return F.rms_norm(x, shape, weight, eps)


def pretend(monkeypatch, **modules):
    """Put modules, given by their names with `_` for `.`, in the place of the installed apex."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def apex(monkeypatch):
    norms = {"fused_layer_norm_affine": layer_norm, "fused_rms_norm_affine": rms_norm}
    normalization = {"apex.normalization.fused_layer_norm": norms}
    extensions = {"amp_C": {}, "fused_layer_norm_cuda": {}}
    optimizers = {"apex": {"__path__": []}, "apex.optimizers": {"FusedAdam": FusedAdam}}
    pretend(monkeypatch, **optimizers, **normalization, **extensions)


def test_apex_is_used_where_it_is_installed(apex):
    assert nvidia_apex.find(*APEX_ADAM) == (FusedAdam, "")
    assert optimizer_kind("fusedadam", "bf16", 1) == ("apex", "apex's FusedAdam")
    assert optimizer_kind("adam", "bf16", 1) == ("adam", "")
    assert optimizer_kind("fusedadam", "fp32", 0) == ("apex", "apex's FusedAdam")
    kind, why = optimizer_kind("fusedadam", "bf16", 0)
    assert kind == "adam" and "DeepSpeed's bf16 training without ZeRO does not take it" in why
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.5}
    assert isinstance(build_optimizer("apex", [group], OptimizerConfig(lr=0.1)), FusedAdam)


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({}, "apex is not installed"),
        ({"apex": {}}, "the installed package `apex` is not NVIDIA's"),
        ({"apex": {"__path__": []}, "apex.optimizers": {}}, "is not NVIDIA's"),
        (
            {"apex": {"__path__": []}, "apex.optimizers": {"FusedAdam": FusedAdam}},
            "apex was built without its CUDA extension amp_C",
        ),
    ],
)
def test_what_is_not_nvidias_apex_is_named(monkeypatch, modules, why):
    pretend(monkeypatch, **modules)
    found, reason = nvidia_apex.find(*APEX_ADAM)
    assert found is None and why in reason
    kind, remark = optimizer_kind("fusedadam", "fp32", 1)
    assert kind == "adam" and remark.startswith("torch's fused Adam instead of") and why in remark


def test_the_apex_of_pypi_may_fail_in_any_way(monkeypatch, tmp_path):
    (tmp_path / "apex.py").write_text("import pyramid_of_another_kind\n")
    pretend(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    assert nvidia_apex.find(*APEX_ADAM)[1] == "the installed package `apex` is not NVIDIA's"


def test_the_norms_of_apex_compute_what_replaces_them(apex, monkeypatch):
    x = torch.randn(3, 8, dtype=torch.float64)
    outputs = {}
    for where in ("apex", "torch"):
        if where == "torch":
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for norm in ("layernorm", "rmsnorm"):
            shape = BlockShape(hidden_size=8, num_heads=2, norm=norm, norm_eps=0.1, fused_norm=True)
            assert apex_norm(shape)[1].startswith(f"{where}'s {norm}")
            outputs[where, norm] = BlockNorm(shape).double()(x)
            if where == "apex":  # a plan runs without data, which apex's kernels refuse
                kernel = mock.Mock(side_effect=RuntimeError("input must be a CUDA tensor"))
                block = BlockNorm(shape)
                block.kernel = kernel
                assert block.to("meta")(x.float().to("meta")).shape == x.shape
                with pytest.raises(RuntimeError):
                    BlockNorm.forward(block, x)
    for norm in ("layernorm", "rmsnorm"):
        assert torch.equal(outputs["apex", norm], outputs["torch", norm])
    plain = BlockShape(hidden_size=8, num_heads=2, norm_eps=0.1)
    assert torch.equal(BlockNorm(plain).double()(x), outputs["torch", "layernorm"])
    assert apex_norm(plain) == (None, "")
    rms = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()  # epsilon is inside the root
    torch.testing.assert_close(outputs["torch", "rmsnorm"], rms)


def test_a_job_says_what_it_uses_and_computes_what_adam_computes(tmp_path):
    prefix = write_shards(tmp_path)
    small = {"train_iters": 2, "eval_iters": 0, "num_layers": 1}
    fused_norm = BlockShape(hidden_size=8, num_heads=2, fused_norm=True)
    losses = []
    for kind in ("FusedAdam", "Adam"):
        keys = {"optimizer": {"type": kind, "params": {"lr": 0.01}}, "layernorm_fusion": True}
        keys |= {"train_micro_batch_size_per_gpu": 4}
        config, run = write_run_config(tmp_path / kind, prefix, **small, **keys)
        text = call("train.py", config)
        losses.append(list(rows(run).values()))
        _, optimizer = optimizer_kind("fusedadam", "fp32", 1)
        assert (f"optimizer: {optimizer}" in text) == (kind == "FusedAdam")
        assert f"norm: {apex_norm(fused_norm)[1]}" in text
    assert losses[0] == pytest.approx(losses[1])  # equal, where there is no apex
