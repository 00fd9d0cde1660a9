"""Test the parity tool on the committed models and curves; a case with one change must fail.

`test_check_parity_data.py` has the data, the schedules and the derived configurations.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.positional.kerple_log import KerpleLog
from tests.helpers.launch import run_script
from tests.helpers.parity import changed_npz, check
from tests.helpers.paths import ROOT
from tests.parity.case_files import case_config, require_divisible
from tools.check_parity import groups_of, main


@pytest.fixture(scope="module", autouse=True)
def leave_the_job():
    """Leave the job of one process that training cases join."""
    yield
    groups_of.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def command(*args: object, cwd: Path = ROOT) -> tuple[int, str]:
    """Run the tool, and return its exit code and its stdout."""
    script = ROOT / "tools" / "check_parity.py"
    return run_script(script, *args, cwd=cwd, environ=dict(os.environ), only="stdout")


def test_every_committed_case_passes_with_every_backend_of_the_cpu(cases):
    code, text = command(cases, "--backend", "eager", "blocked", cwd=Path("/"))
    assert code == 0, text
    lines = text.splitlines()
    assert lines[-1] == "41 cases, 0 failed"
    assert all(line.startswith("ok    parity/") for line in lines[:-1])
    for expected in (
        "models/kerple_log fp64 eager: clamped kernel",
        "models/kerple_log fp64 blocked: clamped kernel",
        "models/kerple_log_bf16 bf16 eager: logits",
        "models/learned_ten_layers fp64 blocked: logits",
        "models/tp2_row_gptj_geglu fp64 eager: clamped kernel",
        "training/gas2_decay fp32 blocked: loss",
        "training/train_bf16_master_kerple_log bf16 eager: loss",
    ):
        assert any(expected in line for line in lines), expected


@pytest.mark.parametrize(
    "key, number",
    [("mlp.dense_4h_to_h.weight", (3, 5)), ("attention.dense.bias", (7,))],
)
def test_one_changed_number_of_a_checkpoint_is_seen(cases, tmp_path, capsys, key, number):
    """The changes are a weight increased by 0.01, and the sign of one bias."""
    shutil.copytree(cases / "models" / "kerple_log", tmp_path / "kerple_log")
    [path] = tmp_path.rglob("layer_03-model_00-model_states.pt")
    state = torch.load(path)
    state[key][number] += 1e-2 if key.endswith("weight") else -2 * state[key][number]
    torch.save(state, path)
    code, lines = check(capsys, tmp_path / "kerple_log")
    assert code == 1 and lines[-1] == "2 cases, 2 failed"
    assert all(line.startswith("FAIL") and "TOO FAR" in line for line in lines[:-1])


def test_the_sign_of_the_kernel_is_seen(cases, capsys, monkeypatch):
    formula = KerpleLog.bias
    monkeypatch.setattr(KerpleLog, "bias", lambda self, *args: -formula(self, *args))
    code, lines = check(capsys, cases / "models" / "kerple_log", cases / "kernels")
    failed = [line for line in lines if line.startswith("FAIL")]
    assert code == 1 and len(failed) == 4 and all("kerple_log" in line for line in failed)


@pytest.mark.parametrize("key", ["grad_l2_fp64_L64", "token_loss_fp64_L128", "loss_fp32_L64"])
def test_every_quantity_counts(cases, tmp_path, capsys, key):
    shutil.copytree(cases / "models" / "kerple_log", tmp_path / "kerple_log")
    changed_npz(tmp_path / "kerple_log" / "expected.npz", key, lambda stored: stored * (1 + 1e-4))
    code, lines = check(capsys, tmp_path)
    assert code == 1 and lines[-1] == "2 cases, 1 failed"


def tied(case: Path) -> Path:
    """Rename the case's word embedding as the published pipeline names a tied one."""
    manifest = case / "manifest.json"
    text = manifest.read_text()
    assert '"0.word_embeddings.weight"' in text
    manifest.write_text(text.replace('"0.word', '"tied_modules.embed.word'))
    return case


@pytest.fixture(scope="module")
def curves(cases, tmp_path_factory) -> list[str]:
    """Return the tool's output for three changed training cases."""
    folder = tmp_path_factory.mktemp("curves")
    for name, source in {
        "moved": "gas2_decay", "start": "original_fixed_slopes", "tied": "gas2_decay"
    }.items():  # fmt: skip
        shutil.copytree(cases / "training" / source, folder / name)
    kernel = "kernel/2.attention.rpe.bias_a"
    changed_npz(folder / "moved" / "curve.npz", kernel, lambda stored: stored + 2e-4)

    def after_the_start(stored):
        assert stored[0, -1] == 2.0**-8
        stored[1, -1] = 2.0**-8
        return stored

    changed_npz(folder / "start" / "curve.npz", kernel, after_the_start)
    tied(folder / "tied")
    code, text = command(folder)
    lines = text.splitlines()
    assert code == 1 and lines[-1] == "3 cases, 2 failed", text
    return lines


def test_a_changed_curve_is_seen(curves):
    assert curves[0].startswith("FAIL") and "kernel 0.0002 (0.0001) TOO FAR" in curves[0]


def test_the_start_of_a_curve_is_clamped_as_the_first_forward_pass_would(curves):
    """A stored slope of 2^-8 is below its bound and accepted; a wrong later slope fails."""
    assert curves[1].startswith("FAIL") and "kernel 0.0061 (0.0001) TOO FAR" in curves[1]


def test_the_published_name_of_a_tied_embedding_is_known_in_training(curves):
    """It is known in the optimizer's groups and among the final parameters."""
    assert curves[2].startswith("ok    ") and "/tied fp32" in curves[2]


def test_a_case_may_hold_bf16_logits_alone(cases, tmp_path, capsys):
    shutil.copytree(cases / "models" / "kerple_log_bf16", tmp_path / "case")
    path = tmp_path / "case" / "expected.npz"
    with np.load(path, allow_pickle=False) as stored:
        left = ("tokens_", "positions_", "logits_bf16_")
        arrays = {key: stored[key] for key in stored.files if key.startswith(left)}
    np.savez(path, **arrays)
    code, lines = check(capsys, tmp_path / "case")
    found = re.match(r"ok    case bf16 eager: logits (\S+) \(0\.1\)", lines[0])
    assert code == 0 and found and float(found[1]) <= 0.1, lines  # processors round differently
    assert lines[-1] == "1 cases, 0 failed"


def test_the_published_name_of_a_tied_embedding_is_known(cases, tmp_path, capsys):
    """The committed case has the other name, `0.word_embeddings.weight`."""
    case = tied(shutil.copytree(cases / "models" / "rpe_tied_rmsnorm", tmp_path / "tied"))
    code, lines = check(capsys, case)
    assert code == 0 and lines[-1] == "2 cases, 0 failed", lines
    assert all("gradient values" in line for line in lines[:-1])
    changed_npz(case / "expected.npz", "grad_sum_fp64_L16", lambda stored: stored * (1 + 1e-3))
    code, lines = check(capsys, case)
    assert code == 1 and lines[-1] == "2 cases, 1 failed"
    manifest = case / "manifest.json"
    manifest.write_text(manifest.read_text().replace("tied_modules.embed.", "tied_modules.head."))
    code, lines = check(capsys, case)
    assert code == 1 and "parameters with a gradient" in lines[0]


def test_the_factor_of_a_table_is_found_whatever_the_head_size(tmp_path, capsys):
    table = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    row = (8**0.5 * table[11::-1].T).astype(np.float32)  # below 16 a distance is its own bucket
    probes = {"rpe/float32/param/weight": table, "rpe/float32/L12": row}
    np.savez(tmp_path / "probes.npz", **probes)
    code, lines = check(capsys, tmp_path)
    assert code == 0, lines
    np.savez(tmp_path / "probes.npz", **probes | {"rpe/float32/L12": row * (1 + 1e-5)})
    assert check(capsys, tmp_path)[0] == 1


def test_what_cannot_be_cut_is_refused_before_any_rank_waits_for_another(cases):
    config = case_config(cases / "models" / "kerple_log", [], 512)
    require_divisible(config, 512, 2)
    for vocab_size, parts in ((511, 2), (512, 8)):
        with pytest.raises(ValueError, match=f"4 heads and .* {vocab_size} cannot be sharded"):
            require_divisible(config, vocab_size, parts)


def test_nothing_found_and_half_a_case_are_failures(cases, tmp_path, capsys):
    code, lines = check(capsys, tmp_path)
    assert (code, lines) == (1, [])
    half = shutil.copytree(cases / "models" / "kerple_log", tmp_path / "half")
    (half / "expected.npz").unlink()
    code, lines = check(capsys, tmp_path)
    assert code == 1 and "neither expected.npz nor curve.npz" in lines[0]
    shutil.copy(cases / "models" / "kerple_log" / "expected.npz", half)
    next(half.rglob("layer_04*")).unlink()
    code, lines = check(capsys, tmp_path)
    assert code == 1 and "layer_04-model_00-model_states.pt: missing" in " ".join(lines)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere")])
    assert f"no such folder: {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_two_processes_hold_one_model_and_pass_too(cases, tmp_path):
    """Every model and curve passes, and a changed case fails, too."""
    shutil.copytree(cases / "models" / "kerple_log", tmp_path / "changed")
    stored = tmp_path / "changed" / "expected.npz"
    changed_npz(stored, "grad_l2_fp64_L64", lambda stored: stored * (1 + 1e-4))
    code, text = command("--tp", "2", cases / "models", cases / "training", tmp_path)
    lines = text.splitlines()
    assert code == 1 and len(lines) > 17, text
    assert lines[-1].endswith(" cases, 1 failed")
    [failed] = [line for line in lines if not line.startswith("ok")][:-1]
    assert "/changed fp64 eager" in failed and "TOO FAR" in failed
    assert any("models/kerple_log fp64 eager" in line and "kernel gradients" in line
               for line in lines)  # fmt: skip


def test_what_a_backend_does_not_serve_is_reported_and_has_no_verdict(cases, capsys):
    learned, kerple = cases / "models" / "learned_ten_layers", cases / "models" / "kerple_log"
    code, lines = check(capsys, learned, kerple, "--backend", "sdpa")
    assert code == 0 and lines[-1] == "2 cases, 0 failed, 2 not served by the backend asked for"
    refused = [line for line in lines if line.startswith("- ")]
    assert len(refused) == 2 and all("use auto, eager" in line for line in refused)
    code = main([str(kerple), "--backend", "sdpa"])
    assert code == 1 and "no backend serves a case" in capsys.readouterr().err
