"""Test mistakes on command lines: reported before anything is read, with a remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONFIG = "configs/quickstart.yml"


@pytest.mark.parametrize(
    "command, code, message",
    [
        (("evaluate.py", CONFIG, "--lengths", "128,x"), 2, "--lengths 128,x: write whole numbers"),
        (("evaluate.py", CONFIG, "--lengths", ""), 2, "--lengths : write whole numbers"),
        (("evaluate.py", CONFIG, "--load", ".", "--out", "LICENSE"), 1, "results in LICENSE: "),
        (
            ("evaluate.py", CONFIG, "-o", "eval_lengths=[]", "-o", "save=null", "-o", "load=null"),
            2,
            "give --load DIR (or `load` in the config) and --lengths L1,L2,... (or `eval_lengths`",
        ),
        (("train.py", CONFIG, "--gpus", "8"), 2, "--gpus needs --plan, --check or --rehearse; "),
        (("train.py", CONFIG, "--check", "--price", "3"), 2, "--mfu and --price need --plan"),
        (("tools/check_parity.py", "nowhere"), 2, "no such folder: nowhere"),
        (("tools/check_parity.py", "tests", "--backend", "egaer"), 2, "choose from 'auto'"),
        (("tools/check_parity.py", "tests", "--configs", "no"), 2, "no such folder: no"),
        (("tools/check_parity.py", "tests", "--tp", "0"), 2, "argument --tp: 0 is not in [1, inf]"),
    ],
)
def test_mistakes(repo_root, command, code, message):
    done = subprocess.run(
        [sys.executable, *command], cwd=repo_root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_check_parity_knows_every_backend():
    from megatron.attention.choice import BACKENDS
    from tools import check_parity

    assert {"auto", *BACKENDS} == set(check_parity.BACKENDS)
