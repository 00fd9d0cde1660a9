"""Test jobs from the command line: faults, resuming, and mistakes of a user."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.run

from megatron.engine.training.schedule import Schedule
from tests.helpers.jobs import MEASURED, cell, digest, measured, rewind, rows, write_config
from tests.helpers.launch import call
from tests.helpers.paths import ROOT
from tests.helpers.shards import write_documents


def command(script, *args):
    return [sys.executable, str(ROOT / script), *map(str, args)]


def call_in_new_interpreter(script, *args, **env):
    """Run a command in a new interpreter, and return its output."""
    done = subprocess.run(
        command(script, *args),
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def config_at(folder, prefix, **changes):
    run = folder / "run"
    keys = {"save": str(run), "load": str(run), "train_micro_batch_size_per_gpu": 4}
    return write_config(folder / "config.yml", prefix, **(keys | changes)), run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prefix):
    """Return a run of six steps with checkpoints at 3 and 6. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    lengths = {"eval_lengths": [16, 32], "eval_tokens": 256, "eval_context_baseline": 4}
    config, run = config_at(folder, prefix, save_interval=3, **lengths)
    return config, run, call("train.py", config)


def test_kill_9_then_the_same_command_gives_the_same_weights(tmp_path, prefix):
    settings = {"train_iters": 60, "save_interval": 5, "hidden_dropout": 0.1}
    alone, uninterrupted = config_at(tmp_path / "alone", prefix, **settings)
    call("train.py", alone)
    config, run = config_at(tmp_path / "killed", prefix, **settings)
    with subprocess.Popen(  # after some 25 steps it waits in `print`, because nobody reads the pipe
        command("train.py", config), cwd=ROOT, stdout=subprocess.PIPE, pipesize=4096
    ) as process:
        deadline = time.monotonic() + 200
        while not (run / "metrics.jsonl").exists() or max(rows(run), default=0) < 13:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert max(rows(run)) < 60
    text = call("train.py", config)
    assert f"resuming from {run / 'global_step'}" in text
    assert digest(run) == digest(uninterrupted)
    assert rows(run) == rows(uninterrupted)


def test_it_needs_no_compiler_and_no_ninja(tmp_path, prefix):
    """Nor does it import torch's compiler, which takes 1.7 s, as torch's own optimizers do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    extensions = tmp_path / "extensions"
    muon = {"optimizer": {"type": "muon", "params": {"lr": 0.01}}, "eval_interval": 1}
    config, run = config_at(tmp_path, prefix, train_iters=2, **muon, **cell(1, "fp32"))
    program = tmp_path / "program.py"
    program.write_text("import sys, train\ntrain.main()\nassert 'torch._dynamo' not in sys.modules")
    for tool in ("cc", "gcc", "g++", "c++", "ninja"):
        assert shutil.which(tool, path=str(tools)) is None
    call_in_new_interpreter(
        program, config, PYTHONPATH=str(ROOT), PATH=str(tools),
        TORCH_EXTENSIONS_DIR=str(extensions), CXX="", CC="",
    )  # fmt: skip
    assert (run / "global_step2").is_dir()
    assert not extensions.exists() or not any(extensions.iterdir())


def test_the_log_is_quiet_and_says_what_matters(finished):
    _, run, text = finished
    lines = text.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 6
    for word in ("loss", "lr", "grad norm", "tokens/s", "ETA", "theta"):
        assert all(word in line for line in steps), word
    assert f"starting fresh: {run} holds no checkpoint" in text
    assert "attention: blocked (auto" in text
    start = lines[: lines.index(steps[0])]
    assert len(start) <= 15, start
    for what in (" parameters, kerple_log, ", "1 x 1 x 1 cpu", " tokens in ", f"; into {run}"):
        assert any(what in line for line in start), what
    assert "to do: 6 steps of 4 x 16 tokens, 384 in all" in "\n".join(start)
    for noise in ("[INFO]", "[WARNING]", "Warning", "DeepSpeed info"):
        assert noise not in text, noise


def test_the_run_folder_holds_everything(finished):
    _, run, text = finished
    names = {path.name for path in run.iterdir()}
    assert {"config.yml", "metrics.jsonl", "latest", "global_step3", "global_step6"} <= names
    header, *rest = (run / "extrapolation.csv").read_text().splitlines()
    assert header == "length,sequences,loss,perplexity,bits_per_byte,stderr," + MEASURED
    assert [line.split(",")[:2] for line in rest] == [["16", "16"], ["32", "8"]]
    for picture in ("extrapolation.png", "kernels.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    assert not [name for name in names if name.startswith(".")]


def test_a_finished_run_is_evaluated_again_not_trained_again(finished, tmp_path, prefix):
    config, run, _ = finished
    before = digest(run)
    text = call("train.py", config)
    assert "step 1/6" not in text and "resuming from" in text and "length 16" in text
    assert digest(run) == before


def test_evaluate_gives_the_numbers_that_training_printed(finished, tmp_path):
    config, run, _ = finished
    text = call("evaluate.py", config, "--load", run, "--lengths", "16,32,64", "--out", tmp_path)
    theirs = measured(tmp_path)
    assert len(theirs) == 3 and "evaluating" in text
    for a, b in zip(measured(run), theirs, strict=False):
        assert a == pytest.approx(b, rel=1e-6)


def test_distances_can_be_scaled_at_test_time(finished, tmp_path):
    """The losses are other ones, and the report has the factor."""
    config, run, _ = finished
    args = (config, "--load", run, "--lengths", "16,32", "--out", tmp_path)
    text = call("evaluate.py", *args, "-o", "eval_distance_scale=0.25")
    assert "distances x 0.25" in text
    for a, b in zip(measured(tmp_path), measured(run), strict=True):
        assert a[:2] == b[:2] and (a[-1], b[-1]) == (0.25, 1.0)
        assert a[2] != b[2] and a[2] == pytest.approx(b[2], abs=0.5)


def test_raising_train_iters_keeps_what_was_consumed(finished, tmp_path, prefix):
    config, run, _ = finished
    longer = tmp_path / "run"
    shutil.copytree(run, longer)
    before = rows(run)
    options = ["-o", f"save={longer}", "-o", f"load={longer}", "-o", "train_iters=9"]
    changes = ["-o", "optimizer.params.lr=0.02", "-o", "lr_decay_iters=9", "-o", "weight_decay=0"]
    text = call("train.py", config, *options, *changes)
    assert "resuming from" in text
    after = rows(longer)
    assert list(after) == list(range(1, 10))
    assert {step: after[step] for step in before} == before
    # the first step after resuming follows this run's settings, not the checkpoint's
    schedule = Schedule(0.02, 9, 0.2 * 9, "cosine")
    rates = rows(longer, "train/lr")
    assert [rates[step] for step in (7, 8, 9)] == pytest.approx([schedule(s) for s in (6, 7, 8)])
    state = torch.load(longer / "global_step9" / "mp_rank_00_model_states.pt", weights_only=False)
    assert state["module"]["embedding.theta"].shape == (4, 2)


def test_finetune_starts_from_the_weights_and_a_killed_one_resumes(finished, tmp_path):
    config, run, _ = finished
    options = ["-o", "finetune=true", "-o", f"save={tmp_path / 'tuned'}"]
    text = call("train.py", config, *options, "-o", "exit_interval=2")
    assert "starting at step 0 from the weights of" in text and "leaving at step 2" in text
    text = call("train.py", config, *options)
    assert "resuming the finetuning from" in text
    assert list(rows(tmp_path / "tuned")) == list(range(1, 7))


def test_another_layout_or_other_data_is_refused_with_a_way_out(finished, tmp_path, prefix):
    config, run, _ = finished
    text = call("train.py", config, "-o", "zero_optimization.stage=0", code=1)
    assert "another layout, and ZeRO-0 keeps its optimizer state where" in text
    assert "zero_stage 1 to 0" in text and "finetune: true" in text
    text = call("train.py", config, "-o", "seed=9", code=1)
    assert "seed: 1234 in the checkpoint, 9 here" in text and "finetune" in text
    changed = shutil.copytree(Path(prefix).parent, tmp_path / "changed") / Path(prefix).name
    tokens = bytearray(changed.with_name(f"{changed.name}.bin").read_bytes())
    tokens[100] ^= 1
    changed.with_name(f"{changed.name}.bin").write_bytes(tokens)
    text = call("train.py", config, "-o", f"data_path={changed}", code=1)
    assert re.search("written with another data [(]content: '[0-9a-f]{32}' in the ch", text), text
    assert "the tokens it was trained on" in text and "seed" not in text
    text = call("train.py", config, "-o", "pos_emb=kerple_power", code=1)
    assert "pos_emb: 'kerple_log' in the checkpoint, 'kerple_power' here" in text
    options = ["--load", run, "--lengths", "16", "-o", "pos_emb=none"]
    text += call("evaluate.py", config, *options, code=1)
    assert "pos_emb: 'kerple_log' in the checkpoint, 'none' here" in text
    assert "Traceback" not in text
    assert (run / "latest").read_text() == "global_step6"


def test_a_folder_with_another_runs_checkpoints_is_not_overwritten(finished):
    config, run, _ = finished
    text = call("train.py", config, "-o", "load=null", code=1)
    assert f"write `load: {run}` to continue, or another `save`" in text
    assert "Traceback" not in text


def test_two_processes_under_torchrun(finished, tmp_path, prefix):
    config, run = config_at(tmp_path, prefix, train_micro_batch_size_per_gpu=2)
    options = ("--standalone", "--nproc-per-node=2")
    call(torch.distributed.run.__file__, *options, ROOT / "train.py", config)
    alone = rows(finished[1])
    for step, loss in rows(run).items():
        assert loss == pytest.approx(alone[step], abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"pos_emb": "kerpel_log"}, ["config.yml:", "pos_emb", "did you mean kerple_log"]),
        ({"hiden_size": 8}, ["config.yml:", "hiden_size", "hidden_size"]),
    ],
)
def test_a_typo_is_answered_with_file_line_and_the_right_word(tmp_path, prefix, changes, texts):
    config, _ = config_at(tmp_path, prefix, **changes)
    text = call("train.py", config, code=2)
    for expected in texts:
        assert expected in text
    assert "Traceback" not in text


def test_check_prints_the_result_and_trains_nothing(tmp_path, prefix):
    config, run = config_at(tmp_path, prefix)
    text = call("train.py", config, "--check")
    assert "kerple_log" in text and "derived" in text
    assert not run.exists()


def test_missing_shards_and_missing_checkpoints_are_named(tmp_path, prefix):
    config, run = config_at(tmp_path, str(tmp_path / "nowhere"))
    text = call("train.py", config, code=1)
    assert "nowhere" in text and "Traceback" not in text
    text = call("evaluate.py", config, "--load", run, "--lengths", "16", code=1)
    assert "holds no checkpoint" in text and "Traceback" not in text
    config, _ = config_at(tmp_path, prefix, tokenizer_type="GPT2BPETokenizer")
    assert "vocab_file" in call("train.py", config, code=1)
    config, _ = config_at(tmp_path, None)
    text = call("train.py", config, code=1)
    assert "data_path is not set" in text and "Traceback" not in text


def test_a_damaged_checkpoint_is_named(finished, tmp_path):
    config, run, _ = finished
    torn = tmp_path / "run"
    shutil.copytree(run, torn)
    [path] = (torn / "global_step6").glob("*optim_states.pt")
    path.write_bytes(path.read_bytes()[:1000])
    options = ["-o", f"save={torn}", "-o", f"load={torn}", "-o", "train_iters=7"]
    text = call("train.py", config, *options, code=1)
    assert "global_step6 is damaged: " in text and f"{path}: has 1,000 bytes, but " in text
    assert f"resume from {torn / 'global_step3'} with --allow-fallback" in text
    assert "Traceback" not in text


def test_a_diverged_run_leaves_the_checkpoint_as_it_was(finished, tmp_path):
    config, run, _ = finished
    broken = tmp_path / "run"
    rewind(run, broken, step=3)
    path = broken / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["final_norm.weight"].fill_(float("nan"))
    torch.save(state, path)
    record = path.with_name("kerple.json")
    kept = json.loads(record.read_text())
    del kept["files"], kept["checksum"], kept["format"]  # or the change would be found
    record.write_text(json.dumps(kept))
    text = call("train.py", config, "-o", f"save={broken}", "-o", f"load={broken}", code=1)
    assert "the loss is nan at step 4" in text
    assert (broken / "latest").read_text() == "global_step3"


def test_shards_of_another_tokenizer_are_named_before_the_model_sees_them(tmp_path):
    foreign = tmp_path / "foreign"
    write_documents(foreign, [np.full(80, 900)] * 60)
    config, _ = config_at(tmp_path, str(foreign))
    text = call("train.py", config, code=1)
    assert "holds token 900, but the tokenizer has only 257" in text and "Traceback" not in text
