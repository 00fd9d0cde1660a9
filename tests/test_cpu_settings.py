"""Test how a process adapts to the processor: when threads spin for long, and that memory stays."""

import os
import subprocess
import sys

import pytest

from megatron import cpu_settings
from megatron.cpu_settings import LONG_SPIN, SHORT_SPIN
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("threads", "running", "quota", "spin", "why"),
    [
        ("2", 0, "max 100000", LONG_SPIN, "0 other threads ran, 2 processors"),
        ("2", 1, "max 100000", SHORT_SPIN, "1 other threads"),
        ("1", 1, "max 100000", LONG_SPIN, "1 other threads"),
        ("2", 0, "200000 100000", LONG_SPIN, "0 other threads"),
        ("2", 0, "150000 100000", SHORT_SPIN, "fewer than 2 processors"),
        ("2", None, "max 100000", SHORT_SPIN, "unknown"),
    ],
)
def test_threads_spin_for_long_only_on_an_idle_machine(
    tmp_path, monkeypatch, threads, running, quota, spin, why
):
    load = tmp_path / "loadavg"
    if running is not None:
        load.write_text(f"3.14 2.00 1.00 {running + 1}/163 2718\n")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert cpu_settings.running_threads(load) == running
    limited = cpu_settings.is_limited
    monkeypatch.setattr(cpu_settings, "is_limited", lambda n: limited(n, tmp_path / "cpu.max"))
    found, reason = cpu_settings.spin_count(running, processors=2)
    assert found == spin and why in reason


def test_a_system_without_load_and_affinity_spins_briefly(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cpu_settings.spin_count(None, processors=2)[0] == SHORT_SPIN


PROGRAM = """
import os, sys
from megatron import cpu_settings, entry
assert "torch" not in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
print(cpu_settings.described_waiting())
print(cpu_settings.waiting_of_children(1), cpu_settings.waiting_of_children(2))
"""


def said(**environ):
    others = {k: v for k, v in os.environ.items() if k not in cpu_settings.VARIABLES}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=others | environ, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.splitlines()


def test_every_command_chooses_before_torch_and_says_why():
    values, described, children = said()
    policy, spin = values.split()
    assert policy == "PASSIVE" and int(spin) in (LONG_SPIN, SHORT_SPIN)
    assert described.startswith(f"GOMP_SPINCOUNT={spin}, OMP_WAIT_POLICY=PASSIVE (")
    assert children == f"{{}} {{'GOMP_SPINCOUNT': '{SHORT_SPIN}'}}"


def test_what_the_environment_says_stays():
    assert said(GOMP_SPINCOUNT="7") == [
        "None 7",
        "GOMP_SPINCOUNT=7 (as the environment says)",
        "{} {}",
    ]


FAULTS = """
import resource, sys
from megatron import cpu_settings
if sys.argv[1] == "keep":
    cpu_settings.keep_memory()
def use():
    held = [bytearray(20 << 20) for _ in range(4)]
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_kept_memory_is_used_again_without_page_faults():
    """A step's tensors are freed together, which makes glibc return their memory otherwise."""

    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 200 < 20_000 < faults("return")
