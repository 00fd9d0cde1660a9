"""Execute compiled kernels without a GPU: the emulator's self-test, and a few attention calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.paths import ROOT

Emulate = Callable[..., list[str]]


@pytest.fixture(scope="module")
def emulate() -> Iterator[Emulate]:
    """Run a script in a process without Triton's interpreter, and return the lines it prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT)
    server = subprocess.Popen(
        [sys.executable, "tests/ptx/forked.py"], cwd=ROOT, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    def run(script: str, *options: str) -> list[str]:
        print(json.dumps([f"tests/ptx/{script}", *options]), file=server.stdin, flush=True)
        code, printed = json.loads(server.stdout.readline())
        assert code == 0, printed
        return printed.splitlines()

    with server:
        yield run


def test_the_emulator(emulate):
    assert emulate("selftest.py") == ["self test: all as expected"]


@pytest.mark.parametrize(
    "target,cases",
    [
        (
            80,
            [
                "dtype=bf16,E=16,H=2,K=1,T=70,S=150,p=0.1",
                "dtype=bf16,E=16,H=2,K=1,T=20,S=40,p=0.1,cached=1",
                "kind=rpe,dtype=fp32,E=16,H=1,T=70",
                "dtype=fp32,E=16,H=1,T=40",
                "dtype=bf16,E=16,H=8,K=2,T=40,S=70,fill=1",
                "dtype=bf16,E=16,H=8,K=2,T=40,S=70,fill=1,seed=1",
                "kind=alibi,dtype=bf16,E=16,H=4,K=1,T=40,S=70,fill=2,seed=1",
            ],
        ),
        (90, ["dtype=bf16,E=16,H=1,T=140"]),
    ],
)
def test_fused_attention_as_compiled(emulate, target, cases):
    """Output and all gradients are correct, also with several tiles and an incomplete last tile."""
    options = [option for case in cases for option in ("--case", case)]
    *lines, last = emulate("verify.py", "--target", str(target), *options)
    assert last == "0 wrong", "\n".join(lines)
    assert [line.split()[:2] for line in lines] == [["ok", f"sm_{target}"]] * len(cases)


def test_few_queries_as_compiled(emulate):
    """Two parts of the keys, or three where documents end, for four query heads and two seeds."""
    lines = emulate("verify_decode.py", "--only", "^kerple_log bf16 E64 H4/1|^bias,documents")
    assert [line[:3] for line in lines] == ["ok "] * 4 + ["0 w"], lines


def test_theta_gradient_in_bf16(emulate):
    """Each head's gradient is right to 2e-4, although the output is rounded: see `judge`."""
    *lines, last = emulate("verify.py", "--target", "80", "--case", "dtype=bf16,E=16,H=2,T=512")
    assert last == "0 wrong", "\n".join(lines)


def test_dq_where_the_softmax_is_almost_one_hot(emulate):
    """Without `lost`, 60 of 127 rows of dq are off by more than 10%."""
    assert emulate("verify_dq.py", "--kind", "kerple_log")[-1] == "right"


def test_ptx_is_as_committed(emulate):
    """After an intended change of a kernel, `ptx_digests.py --write` writes new digests."""
    lines = emulate("ptx_digests.py", "--only", "sm_90 kerple_log (forward|key) bf16 64")
    assert lines == ["2 compiled, 0 changed"]


def test_formulas_as_compiled(emulate):
    """One has a cosine, which once needed local memory, and one has logits of -1e11."""
    lines = emulate("verify_formulas.py", "--only", "damped|steep$")
    assert [line[:3] for line in lines] == ["ok "] * 3 + ["0 w"], lines


@pytest.mark.parametrize(
    "options",
    (
        "--queries 40 --before 20 --heads 4 --group 4 --seed 0",
        "--queries 40 --before 20 --heads 4 --group 4 --seed 1",
        "--terms fire --target 90 --dropout 0.1",  # it has a pass of its own
        "--terms log_n --target 90 --queries 256",  # in bf16, q times the temperature is too coarse
    ),
)
def test_terms_as_compiled(emulate, options):
    """Without `--terms`, these are a bias with sink, decay (a forget gate) and documents."""
    assert emulate("verify_terms.py", "--queries", "70", *options.split())[-1] == "right"
