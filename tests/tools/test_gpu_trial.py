"""Test the first trial of a GPU: it goes on where it stopped, ends in time, and names the goals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train_step
from benchmarks.host import launch_time
from benchmarks.trial import measurements
from benchmarks.trial.goals import page, rows
from benchmarks.trial.measurements import Trial
from megatron.attention import fused
from megatron.kernels import launch
from tests.helpers.paths import ROOT
from tools import gpu_trial

# The tool with a few made-up measurements, and a torch that has no GPU.
FAKE = """
import os, subprocess, sys, time, types
from pathlib import Path

torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
torch.OutOfMemoryError = MemoryError
goals = types.ModuleType("benchmarks.trial.goals")
goals.page = lambda names, results, machine: "the table of goals"

def fail():
    raise ValueError("does not work")

class Trial:
    machine = os.environ["MACHINE"]

    def __init__(self, rehearsal, folder):
        self.folder = folder

    def hang(self):
        child = subprocess.Popen(["sleep", "1000"])
        (self.folder / "child").write_text(str(child.pid))
        time.sleep(1000)

    def parts(self):
        fine = lambda: {"value": 1}
        last = self.hang if os.environ.get("SLOW") else fine
        return [{"fine": fine, "fails": fail}, {"hangs": self.hang}, {"last": last}]

measurements = types.ModuleType("benchmarks.trial.measurements")
measurements.Trial = Trial
for module in (torch, goals, measurements):
    sys.modules[module.__name__] = module
from tools import gpu_trial
gpu_trial.LIMIT = float(os.environ.get("LIMIT", 1000))
if os.environ.get("SLOW"):
    def join(self, timeout=None):
        while not (Path(sys.argv[2]) / "child").exists():
            time.sleep(0.01)
    from multiprocessing.context import SpawnProcess
    SpawnProcess.join = join
if __name__ == "__main__":
    sys.exit(gpu_trial.main(["--out", sys.argv[2], *sys.argv[3:]]))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that runs the tool with made-up measurements: (its output, the results)."""
    script, out = tmp_path / "fake.py", tmp_path / "out"
    script.write_text(FAKE)

    def run(*options: str, **environment: str) -> tuple[str, dict]:
        for name, value in ({"MACHINE": "one", "PYTHONPATH": str(ROOT)} | environment).items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, str(script), "--out", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((out / "gpu_trial.json").read_text())

    return run


def test_failures_are_recorded_and_the_rest_is_measured(fake):
    printed, results = fake(LIMIT="0.5")
    assert results == {
        "fine": {"value": 1, "on": "one"},
        "fails": {"why": "ValueError: does not work", "on": "one"},
        "hangs": {"why": "it ended its process, or took longer than 0.5 s", "on": "one"},
        "last": {"value": 1, "on": "one"},
    }
    assert printed.endswith("the table of goals\neverything is measured\n")
    printed, same = fake()
    assert same == results and "fine" not in printed and "hangs" not in printed
    printed, _ = fake("--again", "--part", "1")
    assert printed.splitlines()[:2] == ["one", "fails"]
    printed, results = fake("--part", "3", MACHINE="another")
    assert printed.splitlines()[:2] == ["another", "last"]
    assert results["last"]["on"] == "another" and results["fine"]["on"] == "one"


def test_what_runs_when_the_time_is_over_is_stopped_and_begun_anew(fake, tmp_path):
    printed, results = fake("--part", "3", SLOW="1")
    assert printed.endswith("the time is over; call it again for the rest\n")
    assert results["last"].keys() == {"begun", "on"}
    child = Path("/proc") / (tmp_path / "out" / "child").read_text() / "cmdline"
    assert not child.exists() or b"sleep" not in child.read_bytes()  # at most a zombie
    printed, results = fake("--part", "3", SLOW="")
    assert results["last"] == {"value": 1, "on": "one"}


def test_a_worker_that_cannot_start_is_not_started_again(tmp_path, capsys, monkeypatch):
    class Broken:
        exitcode, pid, started = 1, 2**22 + 1, 0

        def __init__(self, **_):
            pass

        def start(self):
            Broken.started += 1

        def join(self, timeout):
            assert 0 < timeout <= 60 - gpu_trial.MARGIN

        def kill(self):
            pass

    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", Broken)
    assert gpu_trial.main(["--minutes", "1", "--out", str(tmp_path)]) == 1
    assert Broken.started == 1
    assert gpu_trial.main(["--minutes", "0.1", "--out", str(tmp_path)]) == 0  # no time for a worker
    assert Broken.started == 1
    assert capsys.readouterr().out == "the time is over; call it again for the rest\n"


def until_killed(out: Path, begun: int) -> tuple[list[str], dict]:
    """Rehearse part 1, and kill the tool when it begins a measurement: the names, the results."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_trial.py"), "--rehearse", "--part", "1"]
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout
        assert tool.stdout.readline().startswith("Triton's interpreter, torch ")
        names = [tool.stdout.readline().rstrip() for _ in range(begun)]
        tool.kill()
        names += tool.stdout.read().splitlines()  # its child ends at the next measurement
    results = json.loads((out / "gpu_trial.json").read_text())
    return names, {name: found for name, found in results.items() if "errors" in found}


def test_a_rehearsal_that_is_killed_goes_on(tmp_path):
    names, done = until_killed(tmp_path, 2)
    assert list(done) == names[: len(done)] and 1 <= len(done) < len(measurements.CASES)
    later, more = until_killed(tmp_path, 2)
    assert later[0] not in done and {name: more[name] for name in done} == done
    assert len(more) > len(done)
    text = (tmp_path / "gpu_trial.md").read_text()
    assert "only its rows of correctness have a meaning" in text
    for name, found in more.items():
        assert max(found["errors"].values()) < found["allowed"] and found["repeats"]
        assert f"| {name}: same bits by cached launches | yes | True | yes |" in text
    assert "| launches | - | not measured | - |" in text


@pytest.fixture
def trial(tmp_path):
    return Trial(True, tmp_path)


def test_the_parts_in_order_of_worth(trial):
    parts = [list(part) for part in trial.parts()]
    assert [len(part) for part in parts] == [20, 16, 3, 2, 14]
    assert parts[0][0] == "correctness, kerple_log, bf16, head size 64"
    assert parts[1][:2] == [
        "attention, length 512, sdpa flash",
        "attention, length 2048, sdpa flash",
    ]
    results = {name: {"why": "x", "on": "here"} for part in parts for name in part}
    assert page(list(results), results, "here").count("| - | x | - |") == 55
    assert page(list(results), results, "there").count("| - | not measured | - |") == 55


def test_attention_and_tiles_in_the_interpreter(trial):
    _, attention, _, _, tiles = trial.parts()
    name = "attention, length 2048, published"
    found = json.loads(json.dumps(attention[name]()))
    ((what, goal, value, met),) = rows(name, found)
    assert what == f"{name}: against published, forward + backward"
    assert goal == ">= 8" and float(value) > 0 and met is (float(value) >= 8)
    name = "tile of the pass forward, head size 64, kerple_log"
    found = json.loads(json.dumps(tiles[name]()))
    assert rows(name, found) == [
        (
            f"{name}: best found / committed, time",
            ">= 0.99",
            "1.000 with 16x16x4x1, the search did not end",
            None,
        )
    ]


def test_memory_is_compared_where_a_gpu_measures_it(trial):
    """On a CPU, the peak is unknown."""
    name = "attention, length 512, sdpa flash"
    found = trial.parts()[1][name]()
    for row in found["timings"]:
        row |= {"peak_mb": 100.0, "forward_backward_ms": 1.0, "forward_ms": 0.5}
    shown = {what.removeprefix(f"{name}: "): value for what, _, value, _ in rows(name, found)}
    assert shown["peak MB beyond flash"] == "0"


def test_a_gpu_without_the_fused_kernels_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fused, "INTERPRETED", False, raising=False)
    monkeypatch.setattr("megatron.kernels.device.INTERPRETED", False)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    with pytest.raises(SystemExit, match="nothing can be measured: .* needs Triton 3.7.1 or newer"):
        Trial(False, tmp_path)


def test_decoding_in_the_interpreter(trial):
    launch.LAUNCHES.clear()
    _, _, _, launches, _ = trial.parts()
    ((what, goal, value, met),) = rows(name := "decoding, 16384 keys", launches[name]())
    assert (what, goal) == (f"{name}, us", "<= 20") and float(value) > 20 and met is False
    assert launch.LAUNCHES == {"decode": 1, "merge": 1}


def test_commands_of_the_other_benchmarks(trial, monkeypatch, tmp_path):
    def run(command, **options):
        given = command[2:]
        if command[1].endswith("train_step.py"):
            args = train_step.arguments().parse_args(given)
            assert args.only == ["project, plain loop", "plain"] and args.layers == 1
            args.out.mkdir()
            numbers = {"share_of_matmul": 0.625, "peak_mb": 1.0, "parts": {}}
            speeds = {"project, plain loop": 3000.0, "plain": 2000.0}
            report = [{"variant": k, "tokens_per_second": v, **numbers} for k, v in speeds.items()]
            (args.out / "train_step.json").write_text(json.dumps({"rows": report}))
        else:
            args = launch_time.parser().parse_args(given)
            head = 'call,passes,"Triton\'s launch, us","cached, us","goal, us"\n'
            Path(f"{args.out}.csv").write_text(f"{head}launch,forward,50.1,31.5,<= 30\n")
        assert "TRITON_INTERPRET" not in options["env"]
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(measurements.subprocess, "run", run)
    _, _, step, launches, _ = trial.parts()
    name = "step, project, plain loop / plain"
    assert rows(name, step[name]()) == [
        (f"{name}: tokens per second", ">= 0.97", "1.50 (3,000 tokens/s)", True),
        (f"{name}: share of the matmul rate of the former", ">= 50%", "62%", True),
    ]
    assert rows("launches", launches["launches"]()) == [
        (
            "launches: host time, launch, forward, us",
            "<= 30",
            "31.5 cached, 50.1 by Triton",
            False,
        )
    ]
    failed = subprocess.CompletedProcess([], 1, stderr="a\nthe reason\nthe end\n")
    monkeypatch.setattr(measurements.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"^the reason; the end$"):
        launches["launches"]()


def test_rows_that_miss_their_goals():
    nan = {"errors": {"out": 0.01, "dq": float("nan")}, "allowed": 0.1, "repeats": False}
    verdicts = [met for *_, met in rows("correctness, x", nan)]
    assert verdicts == [False, False]
    skipped = {"timings": [], "skipped": [{"why": "out of memory"}] * 2}
    name = "attention, length 512, sdpa flash"
    assert rows(name, skipped) == [(name, "-", "out of memory", None)]
    ((*_, text, met),) = rows(name, {"timings": [], "skipped": [{}]})
    assert text == "cannot be shown: KeyError('why')" and met is None  # and the page is written
    tile = {"tile": [64, 32, 4, 2], "share": 0.5, "complete": True, "tried": []}
    assert rows("tile of x", tile)[0][2:] == ("0.500 with 64x32x4x2", False)
    refused = {"share": None, "tried": [{"why": "wrong: off"}]}
    assert rows("tile of x", refused)[0][2:] == ("wrong: off", None)
