"""Execute attention whose query heads share key heads in the PTX emulator, with two seeds.

    python tests/ptx/verify_grouped.py [--out tests/ptx/grouped.txt]    # about 20 minutes

Groups of 4 and 8 query heads share a key head. `key_pass` visits them in one program, in two parts,
or each in programs of its own. The cases are those of `verify.py` and, with documents, a sink, a
decay and dropout, of `verify_terms.py`. The lines are theirs, without times. The last one counts
wrong cases.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = ("kerple_log", "kerple_power", "alibi", "none")
SEEDS = (0, 1)


def commands() -> list[list[str]]:
    found = []
    for target in ("80", "90"):
        cases = [
            f"kind={kind},dtype=bf16,E=64,H={group},K=1,T=70,S=150,fill={fill},seed={seed}"
            for kind, (group, fill), seed in product(KERNELS, ((4, 1), (8, 4), (8, 0)), SEEDS)
        ]
        cases += [
            f"dtype={dtype},E=128,H=8,K=2,T=70,p=0.1,fill=1,seed={seed}"
            for dtype, seed in product(("bf16", "fp16"), SEEDS)
        ]
        options = [option for case in cases for option in ("--case", case)]
        found.append(["verify.py", "--target", target, *options])
        for seed in SEEDS:
            terms = ["--group", "4", "--heads", "8", "--queries", "70", "--seed", str(seed)]
            found.append(["verify_terms.py", "--target", target, *terms])
            gated = ["--terms", "weight,sink,documents", "--size", "64", "--dropout", "0.1"]
            found.append(["verify_terms.py", "--target", target, *terms, *gated])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "grouped.txt")
    args = parser.parse_args()
    wrong, lines = 0, []
    for command in commands():
        done = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True
        )
        shown = re.sub(r"  \[\d+ s\]", "", done.stdout).splitlines() or [done.stderr[-500:]]
        wrong += not re.fullmatch("0 wrong|right", shown[-1])
        name = " ".join(command) if command[0] == "verify_terms.py" else " ".join(command[:3])
        lines += ["", f"# {name}", *shown]
        args.out.write_text(
            "\n".join([*lines, "", f"{wrong} commands found faults"]).lstrip() + "\n"
        )
        print("\n".join(lines[-len(shown) - 1 :]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
