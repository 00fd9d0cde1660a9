"""Measure on a GPU what docs/gpu.md lists, the most important first, and compare it with goals.

    python tools/gpu_trial.py --minutes 9             # repeat it: it continues where it stopped
    python tools/gpu_trial.py --minutes 9 --part 3    # one part only
    python tools/gpu_trial.py --rehearse --minutes 9 --out runs/rehearsal    # without a GPU

The parts are:

1. correctness of 20 variants of attention
2. times of attention at four lengths
3. the training step
4. launches and decoding
5. tile sizes

The tool needs torch 2.11 and triton 3.6 or newer, and no other package of this project.

The tool writes gpu_trial.json (the results) and gpu_trial.md (the table of goals) into the folder
`--out`, after each measurement. A measurement that already has a result from the same GPU and
versions is not repeated. The tool ends before the given minutes are over, and stops a measurement
that would take longer. A measurement that ends its process, or takes longer than LIMIT seconds, is
recorded as failed.

Without a GPU, the tool rehearses: it runs the same code in Triton's interpreter, on tiny inputs.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatron import entry
from megatron.files import write_text

LIMIT = 200.0
"""The most seconds that one measurement may take."""
MARGIN = 8.0
"""The seconds before the end of its minutes at which the tool stops a measurement."""
NAME = "gpu_trial"


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Run the measurements in child processes until all are done or the time is over.

    Print the table of goals, and return the exit code.
    """
    args = arguments().parse_args(argv)
    end = time.monotonic() + 60 * args.minutes - MARGIN
    args.out.mkdir(parents=True, exist_ok=True)
    context, crashed, code = multiprocessing.get_context("spawn"), False, 1
    results, table = (args.out / f"{NAME}.{suffix}" for suffix in ("json", "md"))
    if args.again and results.exists():
        known = json.loads(results.read_text(encoding="utf-8"))
        kept = {name: found for name, found in known.items() if "why" not in found}
        write_text(results, json.dumps(kept, indent=1) + "\n")
    while code and time.monotonic() < end:
        before = results.exists() and results.read_bytes()
        worker = context.Process(target=work, args=(args, crashed))
        worker.start()
        try:
            worker.join(end - time.monotonic())
        finally:  # with the processes that it has started
            code, crashed = worker.exitcode, True
            worker.kill()
            assert worker.pid
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        if code is None:
            break
        if code and before == (results.exists() and results.read_bytes()):
            return 1  # it has printed the reason, and would end again
    if table.exists():
        print(table.read_text(encoding="utf-8"))
    print("everything is measured" if code == 0 else "the time is over; call it again for the rest")
    return 0


def work(args: argparse.Namespace, crashed: bool) -> None:
    """Do all measurements that have no result yet. This function runs in a child process.

    Args:
        args: The parsed command line.
        crashed: Whether the previous child process ended during a measurement.
    """
    os.setpgid(0, 0)
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if rehearsal := not torch.cuda.is_available():
        os.environ.update(TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")
    from benchmarks.attention_clock import broken, reason
    from benchmarks.trial.goals import page
    from benchmarks.trial.measurements import Trial

    path = args.out / f"{NAME}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    trial = Trial(rehearsal, args.out)
    print(trial.machine, flush=True)
    everything = {name: call for part in trial.parts() for name, call in part.items()}
    chosen = everything if args.part is None else trial.parts()[args.part - 1]

    def write(name: str, found: dict) -> None:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():
            sys.exit(1)
        results[name] = found | {"on": trial.machine}
        write_text(path, json.dumps(results, indent=1) + "\n")
        write_text(path.with_suffix(".md"), page(list(everything), results, trial.machine))

    for name, measure in chosen.items():
        before = results.get(name, {})
        if before.get("on") != trial.machine:
            before = {}
        if crashed and "begun" in before:
            write(name, {"why": f"it ended its process, or took longer than {LIMIT:g} s"})
        elif not before or "begun" in before:
            print(name, flush=True)
            write(name, {"begun": os.getpid()})
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                found = measure()
            except Exception as error:  # the rest may still work
                if broken(error):
                    raise
                found = {"why": reason(error)}
            faulthandler.cancel_dump_traceback_later()
            write(name, found)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line's arguments."""
    found = entry.parser(__doc__)
    minutes = entry.number(float, 0.1)
    found.add_argument("--minutes", type=minutes, default=9.0, help="end before these are over")
    found.add_argument("--part", type=int, choices=range(1, 6), help="one part only")
    found.add_argument("--again", action="store_true", help="measure again what failed before")
    found.add_argument("--rehearse", action="store_true", help="tiny inputs, on a CPU")
    folder = Path("benchmarks/results") / NAME
    found.add_argument("--out", type=Path, default=folder, help="folder of the results")
    return found


if __name__ == "__main__":
    entry.run(main)
