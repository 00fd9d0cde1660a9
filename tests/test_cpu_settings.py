"""Test how a process adapts to the processor: how long threads spin, and that memory stays."""

import os
import subprocess
import sys

from megatron import cpu_settings
from tests.helpers.paths import ROOT

PROGRAM = """
import os, sys
from megatron import cpu_settings, entry
assert "torch" not in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
print(cpu_settings.described_waiting())
"""


def said(**environ):
    others = {k: v for k, v in os.environ.items() if k not in cpu_settings.VARIABLES}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=others | environ, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.splitlines()


def test_every_command_chooses_before_torch():
    assert said() == ["PASSIVE 3000", "GOMP_SPINCOUNT=3000, OMP_WAIT_POLICY=PASSIVE"]


def test_what_the_environment_says_stays():
    assert said(GOMP_SPINCOUNT="7") == ["None 7", "GOMP_SPINCOUNT=7"]


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
