"""Hurt one run 30 times, and compare it with a run that was left alone, bit for bit.

    python tests/soak/training.py --folder /tmp/soak --seed 1     as root: it mounts a disk

Two ranks under torchrun train 300 steps, in a new layout after 100 and 200 steps. The faults and
their moments are drawn from the seed. After each fault the same command is given again. A line of
`soak.log` is written after each fault. A second start with the same folder goes on after the last
line. With `--async-save`, the hurt run saves beside training. The last logs are `training.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHASE, PHASES, FAULTS = 100, 3, 30
STAGES = (1, 2, 1)
"""The ZeRO stage of each phase; each change is a conversion of the checkpoint."""
ENDS_WITHIN = 10.0
"""The seconds after which no process of a hurt job may live."""
KEYS = {
    "train_iters": PHASE * PHASES,
    "exit_interval": PHASE,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "hidden_dropout": 0.1,
    "log_interval": 7,
    "eval_interval": 4,
    "eval_iters": 3,
    "save_interval": 5,
    "keep_last_n_checkpoints": 3,
}
DISK = "size=16m"


@dataclass(frozen=True)
class Fault:
    """What happens to a job.

    Attributes:
        what: `signal`, `kill`, `second start` or `disk full`.
        whom: `rank 0`, `rank 1` or `launcher`.
        moment: `accumulation`, `save`, `evaluation`, `conversion` or `any time`; `slow` only makes
            each step take two seconds.
        count: The how-manieth call of the moment's function; for `any time`, tenths of a second
            after the first step.
        number: The signal.
    """

    what: str
    whom: str = ""
    moment: str = ""
    count: int = 0
    number: int = signal.SIGKILL

    def __str__(self) -> str:
        sent = signal.Signals(self.number).name if self.what in ("signal", "kill") else self.what
        return f"{sent} to {self.whom} in {self.moment} {self.count}" if self.whom else sent


def drawn_faults(seed: int) -> list[list[Fault]]:
    """Return the faults of each phase. Each kind of fault and of moment occurs at least twice."""
    dice = random.Random(seed)
    most = {"accumulation": 10, "save": 2, "evaluation": 2, "conversion": 1, "any time": 3}

    def fault(what: str, target: str, moment: str) -> Fault:
        whom = f"rank {dice.randrange(2)}" if target == "rank" else target
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if target == "launcher":
            numbers.remove(signal.SIGUSR1)
        number = signal.SIGKILL if what == "kill" else dice.choice(numbers)
        return Fault(what, whom, moment, dice.randint(1, most[moment]), number)

    pairs = [(what, target) for what in ("signal", "kill") for target in ("rank", "launcher")]
    moments = ("accumulation", "save", "evaluation", "any time")
    faults = [fault(*pair, moment) for pair in pairs for moment in moments]
    faults += [Fault("second start", moment="slow")] * 2 + [Fault("disk full")]
    conversions = [fault(*pair, "conversion") for pair in pairs]
    while len(faults) + len(conversions) < FAULTS:
        faults.append(fault(*dice.choice(pairs), dice.choice(moments)))
    dice.shuffle(faults)
    dice.shuffle(conversions)
    each = FAULTS // PHASES
    second = conversions[:2] + faults[each : 2 * each - 2]
    return [faults[:each], second, conversions[2:] + faults[2 * each - 2 :]]


def hurt_rank(fault: Fault) -> None:
    """Prepare this rank so that it hurts the job at the fault's moment."""
    from megatron.data.samples.loader import TrainLoader
    from megatron.engine.checkpoint import publish, relayout, write
    from megatron.engine.training import loop, pipeline_engine

    def strike() -> None:
        pid = os.getppid() if fault.whom == "launcher" else os.getpid()
        os.kill(pid, fault.number)

    main = fault.whom != "rank 1"
    if os.environ["RANK"] != ("0" if main else "1"):
        return
    owner, name = {
        "accumulation": (TrainLoader, "__next__"),
        "save": (publish, "flush") if main and fault.count > 1 else (write, "describe_files"),
        "evaluation": (pipeline_engine, "next_batches"),
        "conversion": (relayout.ds_to_universal, "main") if main else (relayout, "load"),
        "any time": (loop, "train_step"),
        "slow": (loop, "train_step"),
    }[fault.moment]
    original, calls = getattr(owner, name), []

    def striking(*args, **kwargs):
        calls.append(1)
        if fault.moment == "slow":
            time.sleep(2)
        elif fault.moment == "any time" and len(calls) == 1:
            threading.Timer(fault.count / 10, strike).start()
        elif fault.moment != "any time" and len(calls) == max(1, fault.count):
            strike()
            time.sleep(0.3)
        return original(*args, **kwargs)

    setattr(owner, name, striking)


def be_rank(folder: Path, config: str) -> None:
    """Run `train.py` as one rank, which notes its process id and is hurt as the driver asked."""
    from megatron.engine.job import failure

    (folder / "pids" / str(os.getpid())).touch()
    failure.POLL_INTERVAL = 0.1  # to leave after few of the short steps
    if fault := os.environ.get("SOAK_FAULT"):
        hurt_rank(Fault(**json.loads(fault)))
    stage = os.environ["SOAK_STAGE"]
    sys.argv = ["train.py", config, "-o", f"zero_optimization.stage={stage}"]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


class Run:
    """One run: its folder, and the jobs that train it."""

    def __init__(self, folder: Path, prefix: str, async_save: bool = False):
        from tests.helpers.jobs import write_config

        self.folder, self.save = folder, folder / "disk" / "run"
        (folder / "pids").mkdir(parents=True, exist_ok=True)
        self.save.parent.mkdir(exist_ok=True)
        keys = {"save": str(self.save), "load": str(self.save), "async_save": async_save} | KEYS
        self.config = write_config(folder / "c.yml", prefix, **keys)

    @property
    def step(self) -> int:
        from megatron.engine.checkpoint.saved_checkpoints import newest

        saved = newest(self.save) if self.save.is_dir() else None
        return saved.record.progress.step if saved else 0

    def start(self, fault: Fault | None = None) -> subprocess.Popen[str]:
        environ = os.environ | {"SOAK_STAGE": str(STAGES[min(self.step // PHASE, PHASES - 1)])}
        if fault and fault.moment:
            environ["SOAK_FAULT"] = json.dumps(asdict(fault))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = ["--nproc-per-node=2", str(Path(__file__)), "--rank", "--folder", self.folder]
        command = [*launcher, *script, "--config", self.config]
        return subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self, job: subprocess.Popen[str]) -> tuple[str, float]:
        """Wait for a job's end; return its output, and how long ranks outlived the launcher."""
        from tests.helpers.commands import alive

        text: list[str] = []
        reader = threading.Thread(target=lambda: text.extend(job.stdout or ()), daemon=True)
        reader.start()
        job.wait(240)
        begin = time.monotonic()
        while any(alive(int(path.name)) for path in (self.folder / "pids").iterdir()):
            assert time.monotonic() < begin + 120, "ranks live on"
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        for path in (self.folder / "pids").iterdir():
            path.unlink()
        reader.join()
        return "".join(text), seconds

    def finish_phase(self) -> None:
        """Give the command again until the run has reached the end of its phase."""
        phase = self.step // PHASE
        text, _ = self.ended(self.start())
        assert self.step == (phase + 1) * PHASE, text


def wait_for_steps(run: Run, job: subprocess.Popen[str]) -> None:
    """Wait until the job has written a row of metrics."""
    path, begin = run.save / "metrics.jsonl", time.time()
    while not (path.exists() and path.stat().st_mtime > begin):
        assert job.poll() is None, "the job ended"
        time.sleep(0.02)


def hurt(run: Run, fault: Fault) -> str:
    """Start a job, hurt it, and return what it said of it."""
    job = run.start(fault)
    if fault.what == "second start":
        wait_for_steps(run, job)
        second = run.start()
        text = second.communicate(timeout=200)[0]
        assert second.returncode and "is in use by" in text, text
        job.send_signal(signal.SIGTERM)
        said, _ = run.ended(job)
        assert "left after step" in said, said
        return "the second start was refused"
    ballast = run.save.parent / "ballast"
    if fault.what == "disk full":
        wait_for_steps(run, job)
        ballast.write_bytes(bytes(shutil.disk_usage(ballast.parent).free - (1 << 12)))
    text, seconds = run.ended(job)
    ballast.unlink(missing_ok=True)
    assert seconds < ENDS_WITHIN, f"ranks lived {seconds:.0f} s longer than their launcher"
    found = re.search(r"left after step \d+|there is nothing to save|cannot be written", text)
    if fault.what in ("signal", "disk full"):
        assert found, text
    return found[0] if found else f"ended within {seconds:.1f} s"


def soak(folder: Path, seed: int, until: float, async_save: bool) -> bool:
    """Hurt the run until the time `until`; return whether all is done and well."""
    from tests.helpers.jobs import all_but_speed, digest, write_shards

    log = folder / "soak.log"
    done = log.read_text().count("\n") - 1 if log.exists() else -1
    (folder / "text").mkdir(parents=True, exist_ok=True)
    prefix = write_shards(folder / "text") if done < 0 else str(folder / "text" / "text_document")
    alone, run = Run(folder / "alone", prefix), Run(folder / "hurt", prefix, async_save)
    if not os.path.ismount(run.save.parent):
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "none", run.save.parent], check=True)

    def note(text: str) -> None:
        print(text, flush=True)
        with log.open("a") as file:
            file.write(text + "\n")

    if done < 0:
        how = "two ranks under torchrun" + ", saving beside training" * async_save
        note(f"seed {seed}: {FAULTS} faults over {PHASE * PHASES} steps, {how}")
        done = 0
    for phase, faults in enumerate(drawn_faults(seed)):
        for number, fault in enumerate(faults, phase * FAULTS // PHASES + 1):
            if time.monotonic() > until:
                print(f"stopped before fault {number}; {run.save.parent} is in memory, mounted")
                return False
            if number > done:
                before = run.step
                said = hurt(run, fault)
                note(f"{number:2d} {fault}: {said}; step {before} -> {run.step}")
        for each in (run, alone):
            if each.step < (phase + 1) * PHASE:
                each.finish_phase()
    same = digest(run.save) == digest(alone.save)
    same = same and all_but_speed(run.save) == all_but_speed(alone.save)
    note(f"weights and metrics are {'' if same else 'NOT '}those of the undisturbed run")
    if same:
        subprocess.run(["umount", run.save.parent], check=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--async-save", action="store_true", help="save beside training")
    parser.add_argument("--minutes", type=float, default=60, help="stop after the fault at hand")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_rank(args.folder, args.config)
        return 0
    until = time.monotonic() + 60 * args.minutes
    return 0 if soak(args.folder.resolve(), args.seed, until, args.async_save) else 1


if __name__ == "__main__":
    sys.exit(main())
