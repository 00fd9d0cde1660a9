"""A run that changes its layout has the losses of a run that does not."""

import contextlib
import io
import itertools
import re

import pytest
import torch

from megatron.attention import choose
from megatron.engine.checkpoint import full_weights, relayout
from megatron.engine.checkpoint.checksums import sealed
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.engine.errors import CheckpointError
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.groups import build_groups
from megatron.positional import load
from tests.helpers.jobs import cell, rows, train_run, write_shards
from tests.helpers.launch import call, run_ranks
from tools.reshape_checkpoint import reshape

BASE = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "save_interval": 5,
    "train_iters": 8,
    "eval_iters": 1,
    "hidden_size": 48,
    "activation": "swiglu",  # two stacked matrices, each to be cut by itself
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,  # not hidden_size / num_attention_heads
    "use_qk_layernorm": True,
    "qk_layernorm_kind": "joined",
    "output_norms": True,
    "attention_output_gate": True,
    "use_bias_in_attn_linear": False,
    "add_qkv_bias": True,
    "norm": "rmsnorm",
    "rmsnorm_fusion": True,
}
LAYOUTS = {
    "one": {},
    "zero3": cell(3, "fp32"),
    "dp4": {},
    "dp2-zero3": cell(3, "fp32"),
    "dp2-zero3 in pieces": {"zero_optimization": {"stage": 3, "sub_group_size": 1000}},
    "tp2": {"model_parallel_size": 2},
    "tp2-zero3": {"model_parallel_size": 2, **cell(3, "fp32")},
    "pp2": {"pipe_parallel_size": 2},
    "tp2-pp2": {"model_parallel_size": 2, "pipe_parallel_size": 2},
    "tp2sp-cp2": {"model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    "bf16": cell(1, "bf16"),
    "tp2-bf16": {"model_parallel_size": 2, **cell(1, "bf16")},
    "tp2-untied": {"model_parallel_size": 2, "no_weight_tying": True},
    "tp2-untied-row": {
        "model_parallel_size": 2,
        "no_weight_tying": True,
        "output_layer_parallelism": "row",
    },
}
TRUTHS = {"bf16": "bf16", "tp2-untied": "tp2-untied"}  # else "one"
RANKS = {"one": 1, "zero3": 1, "bf16": 1, "dp4": 4, "tp2-pp2": 4, "tp2sp-cp2": 4}
SOURCES = ("one", "tp2-pp2", "dp2-zero3", "tp2-zero3", "bf16", "tp2-untied")
CHANGES = [
    ("tp2-pp2", "one"),
    ("tp2-pp2", "dp4"),
    ("tp2-pp2", "tp2sp-cp2"),
    ("tp2-pp2", "zero3"),
    ("one", "tp2-pp2"),
    ("one", "zero3"),
    ("dp2-zero3", "pp2"),
    ("dp2-zero3", "dp2-zero3 in pieces"),  # the same ranks, files of other sizes
    ("tp2-zero3", "tp2"),
    ("bf16", "tp2-bf16"),
    ("tp2-untied", "tp2-untied-row"),  # the same ranks, another cut
]


def train(groups, folder, prefix, cells):
    """Train each of `cells`: (name of the run, layout, run to continue at step 5, or None)."""
    for name, layout, source in cells:
        source = folder / source if source else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            keys = BASE | LAYOUTS[layout]
            train_run(groups, folder / name, prefix, keys, source=source, step=5)
        if groups.is_main:
            (folder / f"{name}.log").write_text(printed.getvalue())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("change")
    prefix = write_shards(folder)
    whole = [(name, name, None) for name in SOURCES]
    changed = [(f"{a} to {b}", b, a) for a, b in CHANGES]
    for cells in (whole, changed):
        cells.sort(key=lambda c: RANKS.get(c[1], 2))
        for ranks, group in itertools.groupby(cells, key=lambda c: RANKS.get(c[1], 2)):
            run_ranks(ranks, train, folder, prefix, list(group))
    return folder


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_the_losses_are_those_of_a_run_that_never_changed(runs, old, new):
    truth = TRUTHS.get(old, "one")
    tolerance = 1e-2 if "bf16" in old else 1e-5
    for metric in ("train/loss", "train/grad_norm", "theta/bias_p_max"):
        ours, expected = rows(runs / f"{old} to {new}", metric), rows(runs / truth, metric)
        assert ours.keys() == expected.keys() == set(range(1, 9))
        for step, value in expected.items():
            assert ours[step] == pytest.approx(value, rel=tolerance, abs=tolerance), (metric, step)
    assert not list((runs / f"{old} to {new}").glob(".unfinished*"))
    lineage, source = newest(runs / f"{old} to {new}").record.lineage, newest(runs / old)
    assert lineage == source.record.lineage and len(lineage) == 32


def test_a_conversion_is_told(runs):
    told = (runs / "tp2-pp2 to one.log").read_text()
    assert f"converting {runs / 'tp2-pp2 to one' / 'global_step5'} into this layout" in told
    assert "(model_parallel_size 2 -> 1, pipe_parallel_size 2 -> 1)" in told
    assert "converting" not in (runs / "one.log").read_text()


def describe(**changes):
    pos = load("kerple_log")
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=24, num_heads=4, activation="geglu")
    model = GPT(Plan(GPTShape(1, 32, block, 16, **changes), pos, attend, 1))
    return RunDescription(**full_weights.describe(model, build_groups(torch.device("cpu"))))


def test_every_parameter_has_its_pattern():
    info = relayout.conversion_info(describe())
    kinds = {
        "row": "parameter_with_row_parallelism_patterns",
        "whole": "tp_replicated_parameter_patterns",
        "two": "parameter_with_2_sub_params_cat_dim_0",
    }
    expected = {
        "embedding.theta": None,
        "embedding.word_embeddings.weight": None,
        "final_norm.bias": "whole",
        "final_norm.weight": "whole",
        "layers.0.attention.dense.bias": "whole",
        "layers.0.attention.dense.weight": "row",
        "layers.0.attention.query_key_value.bias": None,
        "layers.0.attention.query_key_value.weight": None,
        "layers.0.input_layernorm.bias": "whole",
        "layers.0.input_layernorm.weight": "whole",
        "layers.0.mlp.dense_4h_to_h.bias": "whole",
        "layers.0.mlp.dense_4h_to_h.weight": "row",
        "layers.0.mlp.dense_h_to_4h.bias": "two",
        "layers.0.mlp.dense_h_to_4h.weight": "two",
        "layers.0.post_attention_layernorm.bias": "whole",
        "layers.0.post_attention_layernorm.weight": "whole",
        "output.weight": None,
    }
    found = {}
    for name in describe().shapes:
        fits = [kind for kind, key in kinds.items() if any(re.match(p, name) for p in info[key])]
        assert len(fits) <= 1, name
        found[name] = fits[0] if fits else None  # None: joined along dimension 0
    assert found == expected


OLD = {
    "data_parallel_size": 1,
    "model_parallel_size": 1,
    "pipe_parallel_size": 1,
    "zero_stage": 1,
    "precision": "fp32",
    "optimizer": "adam",
}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({}, {"precision": "bf16"}, "cannot change precision 'fp32' to 'bf16'"),
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}, "holds Adam's state, not that of sgd"),
        ({"zero_stage": 0}, {}, "no place for it (zero_stage 0 to 1)"),
        ({}, {"zero_stage": 0}, "no place for it (zero_stage 1 to 0)"),
        (
            {},
            {"zero_stage": 3, "model_parallel_size": 2},
            "write zero_stage 1 or 2, or model_parallel_size: 1",
        ),
    ],
)
def test_a_change_that_cannot_be_says_why(old, new, says):
    assert says in relayout.why_not_resumed(OLD | old, OLD | new)


def test_what_can_change_is_not_refused():
    new = {"data_parallel_size": 4, "model_parallel_size": 2, "pipe_parallel_size": 2}
    assert relayout.why_not_resumed(OLD, OLD | new) is None
    assert relayout.why_not_resumed(OLD | new, OLD | {"zero_stage": 3}) is None


def test_the_tool_writes_the_same_weights_and_moments(runs, tmp_path):
    out = [tmp_path / "a", tmp_path / "b"]
    for run, folder in zip(("one", "tp2-pp2"), out, strict=True):
        options = ["--tag", "global_step5", "--workers", "2"]
        call("tools/reshape_checkpoint.py", runs / run, folder, *options)
        assert [path.name for path in folder.iterdir()] == ["global_step5"]
    names = sorted(path.name for path in (out[0] / "global_step5" / "zero").iterdir())
    assert "layers.1.mlp.dense_h_to_4h.weight" in names
    for name in names:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            if name.endswith(".pt"):
                continue
            a, b = (
                torch.load(folder / "global_step5" / "zero" / name / f"{state}.pt")["param"]
                for folder in out
            )
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=f"{name} {state}")


def test_the_tool_reads_zero_3_with_tensor_parallelism(runs, tmp_path):
    folder = reshape(runs / "tp2-zero3", tmp_path / "out", "global_step5", 1)
    found = torch.load(folder / "zero" / "layers.0.attention.dense.weight" / "fp32.pt")["param"]
    truth = Saved(runs / "one", "global_step5").weights()["layers.0.attention.dense.weight"]
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match="exists already"):
        reshape(runs / "tp2-zero3", tmp_path / "out", "global_step5", 1)


def test_the_tool_names_what_is_missing(tmp_path):
    text = call("tools/reshape_checkpoint.py", tmp_path, tmp_path / "out", code=1)
    assert f"{tmp_path} holds no checkpoint" in text


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"zero_stage": 0}, "cannot be converted: ZeRO-0 keeps its optimizer state where"),
        ({"optimizer": "sgd"}, "cannot be converted: the universal format holds Adam's state"),
    ],
)
def test_the_tool_says_what_cannot_be_converted(tmp_path, layout, says):
    folder = tmp_path / "global_step5"
    folder.mkdir()
    progress = {"step": 5, "consumed_samples": 40, "train_samples": 64}
    record = {"progress": progress, "layout": OLD | layout, "files": {}}
    (folder / "kerple.json").write_text(sealed(record))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        reshape(tmp_path, tmp_path / "out", "global_step5", 1)
    (folder / "kerple.json").write_text(sealed(record | {"files": {"a.pt": [3, 1]}}))
    with pytest.raises(CheckpointError, match="is damaged: .*a.pt: missing"):
        reshape(tmp_path, tmp_path / "out", "global_step5", 1)
