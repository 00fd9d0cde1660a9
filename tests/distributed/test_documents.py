"""Test documents, windows and combined embeddings in every layout: training, resuming, converting.

Each model has several of them, so that few models suffice.
"""

import pytest

from tests.helpers.jobs import (
    cell,
    digest,
    measured,
    rows,
    run_job,
    train_run,
    write_config,
    write_shards,
)
from tests.helpers.launch import run_ranks

BASE = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 4,
    "save_interval": 2,
    "eval_interval": 3,
    "eval_iters": 1,
    "seq_length_val": 24,
    "eval_lengths": [41],  # cannot be cut evenly
    "eval_tokens": 246,
}
DOCUMENTS = {"reset_attention_mask": True, "eod_mask_loss": True}
RESTARTED = DOCUMENTS | {"reset_position_ids": True}
MODELS = {
    "cross": RESTARTED
    | {
        "pos_emb": "rotary + kerple_log + fire",
        "pos_emb_options": {"fire": {"length": 8}},
        "sliding_window_width": 9,
    },
    "learned": RESTARTED | {"pos_emb": "learned", "max_position_embeddings": 64},
    "layers": DOCUMENTS
    | {
        "pos_emb": [[["kerple_log"], 1], [["none"], 1]],
        "sliding_window_width": [[[3, "none"], 1]],
        "checkpoint_activations": True,
    },
    "drawn": {"pos_emb": "rotary + log_n + forget_gate", "random_positions": 100},
    "own theta": {"theta_per_layer": True, "no_weight_tying": True, "sliding_window_width": 5},
}
LAYOUTS = {
    **{f"zero{stage}": cell(stage, "fp32") for stage in range(4)},
    "tp2": {"model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipe_parallel_size": 2},
}
TRAINED = {
    "cross": ["zero3", "tp2", "cp2", "pp2"],
    "learned": ["zero2", "tp2", "cp2", "pp2"],
    "layers": ["zero0", "zero1", "cp2", "pp2"],
    "drawn": ["zero3", "tp2", "cp2", "pp2"],
    "own theta": ["zero3", "tp2", "pp2"],
}
CASES = [(model, layout) for model, layouts in TRAINED.items() for layout in layouts]
CHANGES = {"cross": ("pp2", "zero3"), "layers": ("zero1", "pp2"), "own theta": ("zero3", "tp2")}


def train(groups, folder, prefix, cells):
    """Train each of `cells`: (run, model, layout, run to continue at step 2, or None)."""
    for name, model, layout, source in cells:
        source = folder / source if source else None
        keys = BASE | MODELS[model] | LAYOUTS.get(layout, {})
        train_run(groups, folder / name, prefix, keys, source=source, step=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    prefix = write_shards(folder)
    run_ranks(1, train, folder, prefix, [(f"{m} one", m, "one", None) for m in MODELS])
    for model, layouts in TRAINED.items():
        whole = [(f"{model} {layout}", model, layout, None) for layout in layouts]
        again = [(f"{name} again", model, layout, name) for name, _, layout, _ in whole]
        run_ranks(2, train, folder, prefix, whole + again)
    changed = [(f"{m} changed", m, new, f"{m} {old}") for m, (old, new) in CHANGES.items()]
    run_ranks(2, train, folder, prefix, changed)
    return folder


@pytest.mark.parametrize(("model", "layout"), [*CASES, *((model, "changed") for model in CHANGES)])
def test_the_layout_changes_nothing(runs, model, layout):
    run = f"{model} {layout}"
    for metric in ("train/loss", "train/grad_norm", "validation/loss"):
        ours, expected = rows(runs / run, metric), rows(runs / f"{model} one", metric)
        assert ours.keys() == expected.keys() and ours
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-5), (run, metric)
    for a, b in zip(*(measured(runs / each) for each in (run, f"{model} one")), strict=True):
        assert a == pytest.approx(b, rel=1e-4), run


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_resuming_is_exact(runs, model, layout):
    whole, again = runs / f"{model} {layout}", runs / f"{model} {layout} again"
    assert digest(whole) == digest(again)
    assert rows(whole) == rows(again)


def test_documents_and_first_tokens_change_the_loss(runs):
    """Otherwise the tests above test nothing."""
    plain = BASE | {"pos_emb": "learned", "max_position_embeddings": 64}
    changes = {"plain": {}, "own": {"reset_attention_mask": True}, "first": {"eod_mask_loss": True}}
    run_ranks(1, train_plain, runs, plain, changes)
    losses = [rows(runs / name)[1] for name in ("plain", "own", "first", "learned one")]
    assert len(set(losses)) == 4


def train_plain(groups, folder, base, changes):
    for name, keys in changes.items():
        config = folder / f"{name}.yml"
        write_config(config, str(folder / "text_document"), save=str(folder / name), **base | keys)
        run_job(groups, config)
