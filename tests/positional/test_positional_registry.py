"""Test that each file in the folder is an embedding, and what these files import."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import megatron.positional as positional
from megatron.config.choices import POSITIONAL_NAMES
from megatron.embedding_names import POSITIONAL_ALIASES
from megatron.positional import Combination, PositionalError, load, names, within_bounds


def test_the_config_knows_the_same_names():
    assert names() == POSITIONAL_NAMES


def test_unknown_name_names_the_nearest_and_all():
    with pytest.raises(PositionalError) as caught:
        load("kerpel_log")
    assert "'kerpel_log'" in str(caught.value) and "did you mean kerple_log?" in str(caught.value)
    assert all(name in str(caught.value) for name in names())


@pytest.mark.parametrize("alias", POSITIONAL_ALIASES)
def test_other_names_are_loaded(alias):
    assert load(alias) == load(POSITIONAL_ALIASES[alias])
    assert load(f"rotary + {alias}") == load(f"rotary + {POSITIONAL_ALIASES[alias]}")


def test_bounds_of_no_parameters():
    theta = torch.empty(4, 0)
    assert within_bounds(theta, load("none").parameters).shape == (4, 0)


def test_a_combination_needs_a_term():
    for wrong in ([], load("rotary"), ["rotary", "kerple_log"], "rotary + kerple_log"):
        with pytest.raises(PositionalError, match=r"write a list of embeddings: Combination\(\[lo"):
            Combination(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["base", "__init__", "kerple_log.py", "../positional/alibi", ""])
def test_what_is_no_embedding_is_not_loaded(name):
    with pytest.raises(PositionalError, match="no positional embedding"):
        load(name)


def test_options():
    assert load("rpe", num_buckets=16, max_distance=40, scale=8.0).scale == 8.0
    with pytest.raises(PositionalError, match="rpe has no option buckets.*num_buckets"):
        load("rpe", buckets=3)
    for wrong in ({"scale": "big"}, {"scale": True}, {"num_buckets": 4.5}):
        with pytest.raises(PositionalError, match="rpe: option .* is a .*number, not "):
            load("rpe", **wrong)
    assert load("rpe", scale=2).scale == 2
    with pytest.raises(PositionalError, match="kerple_log has no option scale; it has no options"):
        load("kerple_log", scale=2.0)
    with pytest.raises(PositionalError, match="log_n: option temper_bias is true or false, not 1"):
        load("log_n", temper_bias=1)
    assert load("log_n", temper_bias=True).tempers_bias and not load("log_n").tempers_bias
    for wrong in ({"num_buckets": 1}, {"max_distance": 16}):
        with pytest.raises(PositionalError, match="max_distance > num_buckets // 2"):
            load("rpe", **wrong)
    for dimensions in (0, 7):
        with pytest.raises(PositionalError, match="even dimensions >= 2, not"):
            load("sandwich", dimensions=dimensions)
    for wrong in ({"logs": 0, "powers": 0}, {"logs": -1}):
        with pytest.raises(PositionalError, match="kerple_sum needs a term, not logs"):
            load("kerple_sum", **wrong)


def test_a_sum_of_one_kernel_is_this_kernel():
    theta, d = torch.tensor([[0.5, 1.5], [1.25, 0.25]]), torch.arange(300)
    for name, counts in (("kerple_log", (1, 0)), ("kerple_power", (0, 1))):
        pos = load("kerple_sum", logs=counts[0], powers=counts[1])
        assert torch.equal(pos.bias(theta, d), load(name).bias(theta, d))
    columns = [column.name for column in load("kerple_sum", logs=2, powers=1).parameters]
    assert columns == ["log_p0", "log_a0", "log_p1", "log_a1", "power_q0", "power_c0"]


def test_a_new_file_is_found_and_must_define_one_embedding(tmp_path, monkeypatch):
    source = """
        from megatron.positional.base import PositionalEmbedding, ThetaParameter

        class Straight(PositionalEmbedding):
            kind = "distance"
            parameters = (ThetaParameter("m", low=0.0),)

            def bias(self, theta_HN, d):
                d, m = self.columns(theta_HN, d)
                return -m * d
    """
    (tmp_path / "straight.py").write_text(textwrap.dedent(source))
    (tmp_path / "empty.py").write_text("from megatron.positional.base import PositionalEmbedding\n")
    before = names()
    monkeypatch.setattr(positional, "__path__", [str(tmp_path), *positional.__path__])
    assert names() == tuple(sorted([*before, "empty", "straight"]))
    pos = load("straight")
    assert pos.name == "straight"
    theta = torch.tensor([[2.0], [3.0]])
    assert pos.bias(theta, torch.tensor([0, 4])).tolist() == [[0.0, -8.0], [0.0, -12.0]]
    with pytest.raises(PositionalError, match="empty.py must define exactly one .* it has 0"):
        load("empty")


def test_works_where_only_torch_is_installed():
    """The package works although triton, pydantic, deepspeed and others cannot be imported."""
    script = """
        import sys
        for name in ("triton", "pydantic", "deepspeed", "yaml", "numpy.random", "wandb"):
            sys.modules[name] = None
        import torch
        from megatron.attention import attend
        from megatron.positional import load, names
        for name in names():
            pos = load(name)
            theta = pos.initial_theta(2).requires_grad_() if pos.parameters else None
            qkv = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
            decay = pos.decay(torch.randn(1, 2, 5)) if pos.kind == "gate" else None
            for backend in ("eager", "auto"):
                attend(
                    *qkv, pos, theta, scale=0.5, backend=backend, decay_BHS=decay
                ).sum().backward()
        print("ran", len(names()))
    """
    script = textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"ran {len(names())}\n", done.stderr
