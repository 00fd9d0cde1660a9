"""Search for inputs that break the readers: `python -m tests.fuzz --minutes 10`.

Every fuzzer of this folder is run in turn, each round with another seed, in a process of its own,
so that a crash of a library is seen too. A failure is printed with its smallest input, to be kept
as an `@example` of that fuzzer once it is mended. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase

from megatron import entry
from tests.fuzz.damage import Hang

_SECONDS = 600
"""Of one round of one fuzzer, before it counts as a hang: it may wait for a pipe, say."""
_PHASES = (Phase.generate, Phase.target, Phase.shrink)


def fuzzers() -> dict[str, Callable[[], None]]:
    """The fuzzers of this folder, by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_fuzz_*.py")):
        module = importlib.import_module(f"tests.fuzz.{path.stem}")
        for name, value in vars(module).items():
            if name.startswith("test_") and hasattr(value, "hypothesis"):
                found[f"{path.name}::{name}"] = value
    return found


def search(fuzzer: Callable[[], None], seed: int, count: int) -> None:
    """Run `fuzzer` on `count` inputs of this seed; exit with 1 after a failure."""
    options = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=_PHASES,
        suppress_health_check=list(HealthCheck),
    )
    try:
        hypothesis.seed(seed)(options(fuzzer))()
    except (Exception, Hang):
        traceback.print_exc()
        sys.exit(1)


def main() -> int:
    parser = entry.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit [%(default)g]")
    parser.add_argument("--inputs", type=int, default=500, help="of a round [%(default)s]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", default="", help="a part of the names of the fuzzers to run")
    arguments: argparse.Namespace = parser.parse_args()
    chosen = {name: each for name, each in fuzzers().items() if arguments.only in name}
    print(f"seed {arguments.seed}: {len(chosen)} fuzzers", flush=True)
    end, done, failed = time.monotonic() + 60 * arguments.minutes, 0, set()
    context = multiprocessing.get_context("fork")
    for number, (name, fuzzer) in enumerate(itertools.cycle(chosen.items())):
        if time.monotonic() >= end or len(failed) == len(chosen):
            break
        if name in failed:
            continue
        work = (fuzzer, arguments.seed + number, arguments.inputs)
        process = context.Process(target=search, args=work)
        process.start()
        process.join(_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        done += arguments.inputs
        if process.exitcode:
            failed.add(name)
            print(f"FAILED {name}, seed {work[1]}: exit code {process.exitcode}", flush=True)
    tried = min(len(chosen), done // arguments.inputs)
    untried = f"; {len(chosen) - tried} not tried, for want of time" * (tried < len(chosen))
    print(f"{done:,} inputs; {len(failed)} of {tried} fuzzers found a failure{untried}")
    for name in sorted(failed):
        print(f"  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
