"""Fail every system call that writes, or drop what was not flushed, and judge the end.

    python -m tests.faults.search calls --command train --errors ENOSPC,EIO,EINTR --seed 1
    python -m tests.faults.search power --command fresh_train

`calls` fails calls of a command, one in each run (see `inject.py`). `power` rebuilds what a disk
may hold after a power loss, and gives the command again (see `power.py`). Both need strace. If the
log ends within the same search by `calls`, that search goes on after its last trial. The last logs
are `tests/faults/calls.log` and `tests/faults/power.log`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path

from megatron import entry


def trials_done(log: Path | None, search: str) -> frozenset[str]:
    """Return the names of the trials in `log` of a search that was stopped before its end.

    Args:
        search: How the search's first line begins.
    """
    names: set[str] = set()
    ours = False
    for line in log.read_text().splitlines() if log and log.exists() else ():
        if line.startswith("# "):
            ours = line.startswith(search)
        elif ours and line.endswith("faults found"):
            names.clear()
        elif ours and (found := re.match(r"(E\w+ .*): (FAULT|ended|NOT REACHED)", line)):
            names.add(found[1])
    return frozenset(names)


def main() -> int:
    from tests.faults import inject, power
    from tests.faults.all_cases import CASES, POWER
    from tests.faults.trace import NEEDED, installed

    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("what", choices=("calls", "power"))
    add("--command", choices=sorted({*CASES, *POWER}), required=True)
    add("--errors", default="ENOSPC,EIO,EINTR", help="[%(default)s]")
    add("--seed", type=int, default=1)
    add("--most", type=int, default=10**6, help="run at most this many trials, drawn by the seed")
    add("--only", default="", help="a regular expression: only such calls")
    add("--folder", type=Path, help="an empty folder to work in (default: a temporary one)")
    add("--log", type=Path, help="append to this file")
    args = parser.parse_args()
    if not installed():
        entry.refuse(f"error: {NEEDED}", 1)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder = folder.resolve()
    log = args.log.open("a") if args.log else None

    def say(text: str) -> None:
        for file in filter(None, (sys.stdout, log)):
            print(text.replace(str(folder), "FOLDER"), file=file, flush=True)

    search = (
        f"# python -m tests.faults.search {args.what} --command {args.command} --seed {args.seed}"
        + (f" --errors {args.errors}" if args.what == "calls" else "")
        + (f" --most {args.most}" if args.most < 10**6 else "")
        + (f" --only {args.only!r}" if args.only else "")
        + "; "
    )
    before = trials_done(args.log, search)
    say(f"{search}{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Linux, CPU only")
    makes = CASES if args.what == "calls" else POWER
    case = makes[args.command](folder / args.command)
    if args.what == "calls":
        wanted = args.errors.split(",")
        found = inject.hurt(case, wanted, args.seed, args.most, say, args.only, before)
    else:
        found = power.lose(case, args.seed, args.most, say, args.only)
    faults = 0
    for fault in found:
        faults += 1
        print(f"--- {fault}", flush=True)
    say(f"{faults} faults found")
    if args.folder is None:
        shutil.rmtree(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    # Before torch is imported, here and in the process from which the commands are forked.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    entry.run(main)
