"""Count the mutants that tests find: `python -m tests.mutation.count_mutants --seed 27`.

It draws changes of the code (mutants) by the operators of cosmic-ray, and runs on each only the
tests of its file (`covering_tests.py`), in a copy of the tree. First the tests run that take less
than 8 seconds each. If a mutant survives them and `--slow` is given, the slow tests follow.

The log gets a line for each mutant: verdict, seconds, place, operator, old and new line, and the
test that found it. A log that exists is continued: mutants with a verdict are not run again.
`--again` instead runs the survivors of the log again, on the code of today. Write `equivalent` and
the reason into the line of a mutant that computes the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import entry
from tests.mutation.covering_tests import covering, mutated_files
from tests.mutation.log import GONE, KILLED, SLOWLY, SURVIVED, Row, read, summary
from tests.mutation.server import Server, copy_tree

if TYPE_CHECKING:
    from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]


def judged(server: Server, mutant: Mutant, limits: dict[str, float], slow: bool) -> Row:
    """Return the row of a mutant, after its tests."""
    files = covering(ROOT, mutant.file)
    if mutant.file not in limits:
        limits[mutant.file] = 30 + 3 * server.baseline(files)
    true, start = (server.copy / mutant.file).read_text(encoding="utf-8"), time.monotonic()
    server.write(mutant.file, mutant.code)
    try:
        verdict, found = KILLED, server.run(files, limits[mutant.file])
        if slow and not found["failed"]:
            verdict, found = SLOWLY, server.run(files, 1200, slow=True)
    finally:
        server.write(mutant.file, true)
    note = found["failed"][0] if found["failed"] else f"{found['passed']} passed"
    seconds = f"{time.monotonic() - start:.1f}"
    verdict = verdict if found["failed"] else SURVIVED
    return Row(verdict, seconds, mutant.place, mutant.operator, mutant.before, mutant.after, note)


def again(server: Server, row: Row, limits: dict[str, float], slow: bool) -> Row:
    """Return the row of a survivor, after the tests of today on the code of today."""
    from tests.mutation.mutants import Mutant, found_again  # they need cosmic-ray

    file, _, line = row.place.partition(":")
    old = Mutant(file, int(line), row.operator, row.before, row.after)
    rows = [judged(server, mutant, limits, slow) for mutant in found_again(ROOT, old)]
    if not rows:
        return Row(**vars(row) | {"verdict": GONE, "note": "the code is no longer there"})
    # Where one line allows the same change twice, both must die.
    found = next((each for each in rows if each.verdict == SURVIVED), rows[0])
    return Row(**vars(row) | {k: getattr(found, k) for k in ("verdict", "seconds", "note")})


def _start_in_a_copy(folder: Path, log: Path) -> None:
    """Replace this process by one whose code, tests and imports are those of a copy of the tree."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    words = [*sys.argv[1:], "--commit", commit.strip(), "--log", str(log), "--work", str(folder)]
    copy_tree(ROOT, folder / "tree")
    os.chdir(folder / "tree")
    environ = os.environ | {"PYTHONPATH": str(folder / "tree")}
    command = [sys.executable, "-m", "tests.mutation.count_mutants", *words]
    os.execve(sys.executable, command, environ)


def main() -> int:
    parser = entry.parser(__doc__)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--mutants", type=int, default=300, help="to draw [%(default)s]")
    parser.add_argument("--log", type=Path, help="[tests/mutation/seedN.log]")
    parser.add_argument("--again", action="store_true", help="run the log's survivors again")
    parser.add_argument("--slow", action="store_true", help="run slow tests on survivors too")
    parser.add_argument("--only", default="", help="a part of the names of the files to mutate")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mutation"), help="[%(default)s]")
    parser.add_argument("--commit", default="", help=argparse.SUPPRESS)
    given: argparse.Namespace = parser.parse_args()
    if importlib.util.find_spec("cosmic_ray") is None:
        entry.refuse("error: cosmic-ray is missing; pip install cosmic-ray==8.7.0", 1)
    log = (given.log or ROOT / f"tests/mutation/seed{given.seed}.log").resolve()
    if given.work.resolve() / "tree" != ROOT:
        _start_in_a_copy(given.work.resolve(), log)
    comments, rows = read(log)
    if given.again:
        todo = [row for row in rows if row.verdict == SURVIVED and given.only in row.place]
    else:
        from tests.mutation.mutants import draw

        files = [name for name in mutated_files(ROOT) if given.only in name]
        mutants, sites = draw(ROOT, files, given.seed, given.mutants)
        done = {row.key for row in rows}
        todo = [m for m in mutants if (m.place, m.operator, m.before, m.after) not in done]
        print(f"{len(mutants)} of {sites:,} sites, {len(todo)} to run", flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    words = f"--seed {given.seed} " + ("--again" if given.again else f"--mutants {given.mutants}")
    words += " --slow" * given.slow + f" --only {given.only}" * bool(given.only)
    comments.append(
        f"# {time.strftime('%Y-%m-%d')}, python -m tests.mutation.count_mutants {words}, commit "
        f"{given.commit}, {machine}"
    )
    todo.sort(key=lambda each: each.place)
    server, limits = Server(ROOT), {}
    for each in todo:
        if isinstance(each, Row):
            row = again(server, each, limits, given.slow)
            rows[rows.index(each)] = row
        else:
            row = judged(server, each, limits, given.slow)
            rows.append(row)
        print(row.text(), flush=True)
        log.write_text("\n".join([*comments, *(row.text() for row in rows), ""]), encoding="utf-8")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    entry.run(main)
