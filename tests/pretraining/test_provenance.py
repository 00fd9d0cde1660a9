"""Test run.json: the commit and what was changed since, restarts, and that no secret is in it."""

import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.resume import Start
from megatron.pretraining import provenance
from megatron.pretraining.provenance import code_of, record_start, without_secrets

KEY = "0123456789abcdef" * 2 + "deadbeef"


def git(folder, *command):
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", folder, *author, *command], capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    (root / "megatron").mkdir(parents=True)
    git(root.parent, "init", "-q", root)
    (root / "train.py").write_text("print(1)\n")
    (root / "megatron" / "a.py").write_text("a = 1\n")
    (root / "a.yml").write_text("seed: 0\n")
    (root / "huge.jsonl").write_text("{}\n")
    (root / ".gitignore").write_text("runs\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


def test_a_clean_checkout_has_its_commit_and_no_patch(checkout):
    about, patch = code_of(checkout)
    assert about["commit"] == git(checkout, "rev-parse", "HEAD") and len(about["commit"]) == 40
    assert (about["patch"], patch) == (None, "")


def test_the_patch_turns_the_commit_into_the_files_that_ran(checkout, tmp_path):
    (checkout / "train.py").write_text("print(2)\n")
    (checkout / "megatron" / "a.py").unlink()
    (checkout / "megatron" / "new.py").write_text("new = 1")  # without an end of line
    (checkout / "a.yml").write_text("seed: 1\n")
    (checkout / "config.yml").write_text("seed: 2\n")  # as in a run folder
    (checkout / "runs").mkdir()
    (checkout / "runs" / "ignored.py").write_text("x = 1\n")
    (checkout / "huge.jsonl").write_text("{}\n" * 9999)  # a file of the commit
    staged = git(checkout, "status", "--porcelain")
    about, patch = code_of(checkout)
    assert git(checkout, "status", "--porcelain") == staged  # the user's index is as it was
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", checkout, again)
    subprocess.run(["git", "-C", again, "apply"], input=patch.encode(), check=True)
    here = {
        path.name: path.read_text() for path in again.rglob("*") if path.suffix in (".py", ".yml")
    }
    assert here == {
        "train.py": "print(2)\n",
        "a.yml": "seed: 1\n",
    }
    assert "huge" not in patch and len(about["patch"]) == 12
    assert about["new"] == ["megatron/new.py"]


def test_the_commit_is_known_although_the_changes_take_too_long(checkout, tmp_path, monkeypatch):
    slow, git_itself = tmp_path / "git", shutil.which("git")
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *" diff "*) exec sleep 60;; esac\nexec {git_itself} "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "DEADLINE", 3.0)
    about, patch = code_of(checkout)
    assert len(about["commit"]) == 40 and (about["patch"], patch) == (None, "")
    assert about["why"].startswith("no changes are known (Command ")


def test_a_long_patch_is_cut_and_says_so(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "LONGEST_PATCH", 100)
    (checkout / "train.py").write_text("print(2)\n" * 99)
    _, patch = code_of(checkout)
    assert (
        len(patch) < 160 and patch.endswith(" characters)\n") and "(cut: the patch has 1," in patch
    )


def test_an_installed_package_is_no_checkout_even_inside_of_one(checkout, tmp_path, monkeypatch):
    site = checkout / "runs" / "site-packages"
    site.mkdir(parents=True)
    about, patch = code_of(site)
    assert about["commit"] is None and patch == "" and len(about["fingerprint"]) == 12
    assert about["why"].startswith("no commit is known (error: pathspec 'train.py' did not match")
    outside, _ = code_of(tmp_path)
    assert "fatal: not a git repository" in outside["why"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file or directory: 'git'" in code_of(checkout)[0]["why"]


def test_secrets_are_replaced(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", "short")  # too short to be one, and common in texts
    given = {
        f'["-o", "x={KEY}"]': '["-o", "x=***"]',
        "https://me:hunter2@host/x": "https://***@host/x",
        "https://me:p@ss/word@host/x": "https://***@host/x",
        '+api_key = "abcdefgh12345678"': '+api_key = "***"',
        "api_key=letters": "api_key=***",
        "train.py\0--api-key\0abc\0a.yml": "train.py\0--api-key\0***\0a.yml",
        "Authorization: Bearer abc.def": "Authorization: Bearer ***",
        f"login hf_{KEY}": "login hf_***",
        "blob?sv=1&sig=a%2Fb&x=1": "blob?sv=1&sig=***&x=1",
        "password: correcthorse99battery": "password: ***",
        "token = tokenizer.encode(text)": "token = tokenizer.encode(text)",
        "eval_tokens: 65536, key=value, a short one": "eval_tokens: 65536, key=value, a short one",
    }
    assert {text: without_secrets(text) for text in given} == given


def test_a_secret_with_signs_that_json_escapes_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", 'quote"back\\slash\nline')
    monkeypatch.setenv("NCCL_DEBUG", f"x{os.environ['MY_SECRET']}y")
    monkeypatch.setattr("sys.orig_argv", ["train.py", "--token", "abc", "a.yml"])
    record(tmp_path, Start(TrainingProgress(0, 0, 9), ""))
    (entry,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert entry["environment"]["NCCL_DEBUG"] == "x***y"
    assert entry["command"] == ["train.py", "--token", "***", "a.yml"]


def test_a_deleted_folder_does_not_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    _, said = record(tmp_path, Start(TrainingProgress(0, 0, 9), ""))
    assert "this start is not recorded, training goes on: " in said


def record(folder, start, machines=(), lineage="f" * 32):
    said, cpu = [], torch.device("cpu")
    groups = SimpleNamespace(
        device=cpu, is_main=True, gather_from_job=lambda mine: [mine, *machines]
    )
    run = RunDescription(lineage=lineage, data={"seed": 1})
    record_start(folder, groups, run, start, said.append)
    return said


def test_each_start_is_added_with_its_step_checkpoint_and_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", f"secret={KEY}")
    monkeypatch.setenv("MY_OWN", "not recorded")
    (said,) = record(tmp_path, Start(TrainingProgress(0, 0, 9), ""))
    assert said.startswith(f"run {'f' * 12}: code 0.1.0, commit ")
    saved = SimpleNamespace(path=tmp_path / "global_step7", lineage="e" * 32)
    others = ["b: H100, driver 580.1"] * 2
    record(tmp_path, Start(TrainingProgress(7, 7, 9), "", saved, resumes=True), others)
    text = (tmp_path / "run.json").read_text()
    first, second = json.loads(text)["starts"]
    assert [first[name] for name in ("step", "from", "from_run")] == [0, None, None]
    place = str(tmp_path / "global_step7")
    assert [second[name] for name in ("step", "from", "from_run")] == [7, place, "e" * 32]
    assert second["ranks"]["b: H100, driver 580.1"] == 2
    assert len(second["ranks"]) == 2 and second["data"] == {"seed": 1}
    assert second["environment"]["NCCL_DEBUG"] == "secret=***" and KEY not in text
    assert (
        "MY_OWN" not in second["environment"] and second["versions"]["torch"] == torch.__version__
    )
    assert second["folder"] == os.getcwd() and second["command"]


def test_a_damaged_file_and_a_full_disk_are_said_and_end_nothing(tmp_path):
    start, path = Start(TrainingProgress(0, 0, 9), ""), tmp_path / "run.json"
    for damaged in ("{", "[]", "7", '{"starts": 1, "patches": {}}', '{"starts": []}'):
        path.write_text(damaged)
        _, said = record(tmp_path, start)
        assert said.startswith(f"{path}: this start is not recorded, training goes on: ")
        assert path.read_text() == damaged
    _, said = record(tmp_path / "missing", start)
    assert "training goes on: [Errno 2] No such file" in said
