"""The exact words for the mistakes of a first day, each in a command of its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run

import evaluate
from megatron.evaluation.suite import all_measures
from tests.helpers.launch import run_script
from tests.helpers.paths import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yml"
BPE = f"vocab_file={ROOT}/configs/quickstart_bpe.json"


def said(script: str, *arguments: object, code: int, cwd=ROOT) -> str:
    given = [ROOT / script, *arguments]
    found, text = run_script(*given, cwd=cwd, environ=dict(os.environ), only="stderr")
    assert found == code, text
    return text


def test_a_misspelt_config_and_a_wrong_folder(tmp_path):
    assert said("train.py", "configs/quickstrat.yml", code=2) == (
        "1 problem in the configuration:\nconfigs/quickstrat.yml: no such file; did you mean "
        f"quickstart.yml? the current folder is {ROOT}; check the path\n"
    )
    assert said("train.py", "quickstrat", code=2, cwd=tmp_path) == (
        "1 problem in the configuration:\nquickstrat: no such file; did you mean quickstart.yml? "
        f"the current folder is {tmp_path}; check the path\n"
    )
    assert said("train.py", "configs/mine.yml", code=2, cwd=tmp_path) == (
        "1 problem in the configuration:\nconfigs/mine.yml: no such file; the current folder is "
        f"{tmp_path}; check the path\n"
    )
    assert said("train.py", tmp_path / "x.yml", code=2) == (
        f"1 problem in the configuration:\n{tmp_path}/x.yml: no such file; check the path\n"
    )


def test_a_key_one_level_too_high():
    assert said("train.py", QUICKSTART, "-o", "optimizer.lr=1", code=2) == (
        "1 problem in the configuration:\n-o optimizer.lr=1: optimizer.lr: unknown key in "
        "optimizer; write optimizer.params.lr\n"
    )
    assert "unknown key in optimizer; write one of params, type\n" in said(
        "train.py", QUICKSTART, "-o", "optimizer.zzz=1", code=2
    )


def test_a_save_that_cannot_be_written():
    given = ["-o", "save=/proc/x", "-o", "load=null", "-o", "data_path=builtin:copy"]
    given += ["-o", "tokenizer_type=null", "-o", "vocab_file=null", "-o", "train_iters=1"]
    given += ["-o", "eval_lengths=[]", "-o", "eval_context_baseline=0"]
    assert said("train.py", QUICKSTART, *given, code=1).endswith(
        "error: save: /proc/x: /proc cannot be written, No such file or directory; write another "
        "folder\n"
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.jsonl",
            b'{"content": "a"}\n',
            "error: a.jsonl:1: has no key 'text' (its keys: 'content'); name the key of the text: "
            "--text-key KEY\n",
        ),
        (
            "in/a.png",
            b"\x89PNG\r\n\x1a\n\0",
            "error: in/a.png:1: byte 0x89 is not valid UTF-8; convert the file to UTF-8, or leave "
            "it out if it has no text (pictures, archives)\n",
        ),
    ],
)
def test_input_without_text(tmp_path, name, content, words):
    (tmp_path / "in").mkdir()
    (tmp_path / name).write_bytes(content)
    given = ["--input", name.split("/")[0], "--name", "a", "-d", "data", "--workers", "1"]
    assert said("prepare_data.py", *given, code=1, cwd=tmp_path).endswith(words)


def test_a_python_without_the_packages(tmp_path):
    """An environment that has none of the packages: one line, and no traceback."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "new"], check=True)
    python = str(tmp_path / "new" / "bin" / "python")
    command = [python, ROOT / "train.py", QUICKSTART]
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=240, capture_output=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        f"error: {python} has no package pydantic: activate the environment of this project "
        "(source .venv/bin/activate), or install it: python -m pip install -e . -c "
        "requirements.txt\n"
    )


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([], (128, 256, 512, 1024, 2048)),
        (["pos_emb=learned", "max_position_embeddings=600"], (128, 256, 512)),
        (["pos_emb=learned", "max_position_embeddings=257", "opt_pos_emb_offset=2"], (128,)),
    ],
)
def test_the_suite_without_lengths_measures_multiples_of_the_training_length(
    monkeypatch, capsys, positions, lengths
):
    seen = []
    monkeypatch.setattr(all_measures, "run_suite", lambda config, load, **_: seen.append(config))
    command = [
        "evaluate.py",
        str(QUICKSTART),
        "--suite",
        "-o",
        "eval_lengths=[]",
        "-o",
        "save=null",
    ]
    command += [part for key in positions for part in ("-o", key)]
    monkeypatch.setattr(sys, "argv", [*command, "--load", str(ROOT / "tests")])
    assert evaluate.main() == 0
    assert [config.evaluation.eval_lengths for config in seen] == [lengths]
    shown = ", ".join(map(str, lengths))
    assert capsys.readouterr().out == f"no lengths are given: measuring {shown}\n"


def test_a_port_in_use_is_named_without_a_traceback():
    """`MASTER_PORT` is taken: rank 0 of a job says so. Its store is the port's first user."""
    code = (
        "import socket, os, sys; from megatron.engine.job.join import join_job\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    os.environ |= {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1',\n"
        "                   'MASTER_PORT': str(server.getsockname()[1])}\n"
        "    from megatron.engine.errors import StartError\n"
        "    try: join_job()\n"
        "    except StartError as error: sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(
        r"port \d+ of this machine is in use by another program or job; set MASTER_PORT to "
        r"another one\n",
        done.stderr.splitlines(keepends=True)[-1],
    )


def test_a_bad_config_under_torchrun_is_said_once(tmp_path):
    command = [Path(torch.distributed.run.__file__), "--standalone", "--nproc-per-node=2"]
    command += [ROOT / "train.py", QUICKSTART, "-o", "num_layers=x"]
    code, output = run_script(*command, cwd=tmp_path, environ=dict(os.environ))
    text = "num_layers: expected a whole number of at least 1, got the text 'x'; write e.g. 100"
    assert code == 1, output
    printed, _, report = output.partition("train.py FAILED")
    assert printed.count(text) == 1 and report.count(text) <= 1
