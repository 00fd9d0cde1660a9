"""Hurt sweeps, suites, preparations and imports beside a training run, 30 times.

    python -m tests.soak.beside_training --folder /tmp/soak --seed 1     as root: it mounts a disk

`train.py` trains all the time. Each fault hurts one command beside it. Commands, faults and moments
are drawn from the seed. Then the same command is given again, and what it leaves must be what an
undisturbed command left, bit for bit. At the end, so must the losses of the training run. A line of
`soak.log` is written after each fault. A second start with the same folder goes on after the last
line. The last log is `beside_training.log`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.helpers.jobs import all_but_speed
from tests.soak.hurt_commands import Command, commands

ROOT = Path(__file__).resolve().parents[2]
FAULTS = 30
HOW = ("SIGTERM", "SIGINT", "SIGKILL", "second start", "disk full")
ENDS_WITHIN = 20.0
"""The seconds after which a signalled command may not live any more."""
COMPARED_STEPS = 200
DISK = "size=96m"
UNFINISHED = re.compile(r"\.(unfinished|part|tmp|partial)|^\.lease-|\.new-")


def drawn_faults(seed: int, names: list[str]) -> list[tuple[str, str, float]]:
    """Return for each fault the command, the fault and the moment.

    Every command meets every fault once, and some twice. A moment is a share of the time that the
    undisturbed command needs from its first file to its end.
    """
    dice = random.Random(seed)
    pairs = [(name, how) for name in names for how in HOW]
    pairs += dice.sample(pairs, FAULTS - len(pairs))
    dice.shuffle(pairs)
    return [(name, how, dice.random()) for name, how in pairs]


def family(leader: int) -> list[int]:
    """Return the living processes of the session that the process `leader` has begun."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


class Beside:
    """The training run beside the commands: `train.py` on one process, started again at its end."""

    def __init__(self, folder: Path):
        self.folder = folder / "live"
        self.config = folder / "live.yml"
        self.job: subprocess.Popen[bytes] | None = None
        self.log = folder / "train.log"

    def ensure(self) -> None:
        if self.job is None:
            with self.log.open("ab") as log:
                line = ["nice", "-n", "5", sys.executable, "train.py", str(self.config)]
                self.job = subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=log)
            while not (self.folder / "latest").exists():
                assert self.job.poll() is None, self.log.read_text()
                time.sleep(0.1)
        assert self.job.poll() is None, "train.py has ended:\n" + self.log.read_text()[-3000:]

    def stop(self) -> None:
        if self.job is not None:
            self.job.send_signal(signal.SIGTERM)
            assert self.job.wait(300) in (0, 143), self.log.read_text()[-3000:]
            self.job = None


def timed(command: Command) -> tuple[float, float, str]:
    """Run a command undisturbed; return when its first file came, when it ended, its digest."""
    shutil.rmtree(command.target, ignore_errors=True)
    begin = time.monotonic()
    job, first = command.start(), None
    while job.poll() is None:
        if first is None and command.target.exists():
            first = time.monotonic() - begin
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    text = job.communicate()[0]
    assert job.returncode == 0, text
    return first or seconds, seconds, command.digest(command.target)


def hurt(command: Command, how: str, moment: float) -> str:
    """Start a command, hurt it `moment` seconds after its first file, and return its end."""
    job = command.start()
    while not command.target.exists() and job.poll() is None:
        time.sleep(0.02)
    time.sleep(moment)
    ballast = command.target.parent / "ballast"
    if how == "second start":
        second = command.start()
        texts = [each.communicate(timeout=300)[0] for each in (job, second)]
        codes = sorted([job.returncode, second.returncode])
        assert codes[0] == 0 and codes[1] in (0, 1), texts
        assert "Traceback" not in "".join(texts), texts
        return f"exit codes {codes}"
    if how == "disk full":
        with suppress(OSError), ballast.open("wb") as file:  # the command may fill it first
            free = shutil.disk_usage(ballast.parent).free
            file.write(bytes(max(0, free - (1 << 12))))
    elif job.poll() is None:
        job.send_signal(signal.Signals[how])
    begin = time.monotonic()
    text = job.communicate(timeout=300)[0]
    if how != "disk full" and job.returncode:
        seconds = time.monotonic() - begin
        assert seconds < ENDS_WITHIN, f"lived {seconds:.0f} s after {how}"
    while family(job.pid):
        assert time.monotonic() < begin + ENDS_WITHIN or how == "disk full", family(job.pid)
        time.sleep(0.1)
    ballast.unlink(missing_ok=True)
    if how != "SIGKILL":
        assert "Traceback" not in text, text
    return f"exit code {job.returncode}"


def again(command: Command, expected: str) -> str:
    """Give the command again; check that its results are the undisturbed command's."""
    job = command.start()
    text = job.communicate(timeout=300)[0]
    ended = job.returncode == 0
    assert ended or (command.refusal and command.refusal in text), text
    assert command.digest(command.target) == expected, f"{command.name}: other results\n{text}"
    left = [path for path in command.target.parent.rglob("*") if UNFINISHED.search(path.name)]
    assert not left, f"left behind: {left}"
    return "ends well" if ended else "had ended"


def soak(folder: Path, seed: int, until: float) -> bool:
    """Hurt the commands until the time `until`; return whether all is done and well."""
    log = folder / "soak.log"
    made = {command.name: command for command in commands(folder)}
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    if not os.path.ismount(disk):
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "none", disk], check=True)
    done = log.read_text().count("\n") - 1 if log.exists() else 0

    def note(text: str) -> None:
        print(text, flush=True)
        with log.open("a") as file:
            file.write(text + "\n")

    if not log.exists():
        note(f"seed {seed}: {FAULTS} faults to commands beside train.py")
    if not (folder / "done" / "latest").exists():
        train = [sys.executable, "train.py", str(folder / "done.yml")]
        subprocess.run(train, cwd=ROOT, check=True, capture_output=True)
    beside = Beside(folder)
    try:
        beside.ensure()
        times = {name: timed(command) for name, command in made.items()}
        for number, (name, how, share) in enumerate(drawn_faults(seed, list(made)), 1):
            if number <= done:
                continue
            if time.monotonic() > until:
                print(f"stopped before fault {number}")
                return False
            first, seconds, expected = times[name]
            shutil.rmtree(made[name].target, ignore_errors=True)
            said = hurt(made[name], how, share * (seconds - first))
            ending = again(made[name], expected)
            beside.ensure()
            note(f"{number:2d} {how} to {name} after {share:.0%}: {said}; given again it {ending}")
    finally:
        beside.stop()
    alone = folder / "alone"
    keys = [f"save={alone}", f"load={alone}", f"exit_interval={COMPARED_STEPS}"]
    options = [part for key in keys for part in ("-o", key)]
    line = [sys.executable, "train.py", str(folder / "live.yml"), *options]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
    losses = all_but_speed(alone)
    same = all_but_speed(beside.folder)[: len(losses)] == losses and len(losses) > COMPARED_STEPS
    note(f"the training run's losses are {'' if same else 'NOT '}those of a run that was alone")
    if same:
        subprocess.run(["umount", disk], check=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="stop after the fault at hand")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    return 0 if soak(args.folder.resolve(), args.seed, until) else 1


if __name__ == "__main__":
    sys.exit(main())
