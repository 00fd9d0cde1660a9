"""Examine this machine and the installed software, and tell the user how to solve each problem.

    python tools/doctor.py [CONFIG.yml ...] [--json]
    torchrun --nnodes=... tools/doctor.py CONFIG.yml      # every machine of a job

With a config, the tool also checks the run folder `save` of this config, and reports what the
config's `auto` values select. The report is plain text, which can be pasted into an issue. The exit
code is 1 if there is a problem.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron import entry

# isort: split
from megatron import launcher
from megatron.version import __version__
from tools.checkup import machine, software
from tools.checkup.finding import OK, PROBLEM, WARNING, Case, Finding

CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "python": software.python,
    "packages": software.packages,
    "GPU": software.gpus,
    "compiler": software.compiler,
    "choices": software.choices,
    "processor": machine.cpu,
    "threads": machine.threads,
    "open files": machine.open_files,
    "disk": machine.disk,
    "shared memory": machine.shared_memory,
    "names": machine.names,
}
_COLOURS = {OK: 32, WARNING: 33, PROBLEM: 31}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("config", nargs="*", type=Path, help="config files of the run that is planned")
    add("--json", action="store_true", help="print the findings as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    report = examine(arguments.config)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one report for each machine
        print(as_json(report) if arguments.json else as_text(report, sys.stdout.isatty()))
    return int(any(each.level == PROBLEM for _, each in report))


def examine(paths: list[Path]) -> list[tuple[str, Finding]]:
    """Run all checks, and return (name of the check, finding) for each finding.

    Args:
        paths: The config files of the planned run. The list may be empty.
    """
    report: list[tuple[str, Finding]] = []
    gpus = _gpu_count()
    ranks = max(gpus, 1)  # as many as `train.py` alone would start
    if not launcher.is_alone():
        try:
            launcher.join()
            ranks = int(launcher.world_size())
        except (launcher.LaunchError, ValueError) as error:  # wrong environment variables
            report.append(("launcher", _failure(error)))
    several = ranks > int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    config = _loaded(paths, ranks, report) if paths else None
    save = config.checkpoint.save if config is not None else None
    case = Case(config, Path(save or ".").resolve(), gpus > 0, ranks, several)
    for name, check in CHECKS.items():
        try:
            report += [(name, each) for each in check(case)]
        except Exception as error:  # a check meets whatever is broken here, and the others go on
            report.append((name, _failure(error)))
    return report


def _failure(error: Exception) -> Finding:
    text = " ".join(f"{type(error).__name__}: {str(error).removeprefix('error: ')}".split())
    return Finding(PROBLEM, text, "mend what the message names; the other checks went on")


def _loaded(paths: list[Path], ranks: int, report: list[tuple[str, Finding]]) -> Any:
    try:
        from megatron.config import load_config

        return load_config(paths, world_size=ranks)
    except Exception as error:  # a wrong config, or a missing package
        report.append(("config", _failure(error)))
        return None


def _gpu_count() -> int:
    try:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception:  # torch is missing or broken, as `packages` reports
        return 0


def as_json(report: list[tuple[str, Finding]]) -> str:
    return json.dumps([{"check": name, **vars(each)} for name, each in report], indent=1)


def as_text(report: list[tuple[str, Finding]], colours: bool) -> str:
    when = time.strftime("%Y-%m-%d %H:%M %Z")
    lines = [f"KERPLE-NeoX {__version__} on {platform.node()}, {when}"]
    for name, each in report:
        level = f"{each.level:8}"
        if colours:
            level = f"\x1b[{_COLOURS[each.level]}m{level}\x1b[0m"
        lines.append(f"{level} {name:13} {each.text}")
        if each.remedy:
            lines.append(f"{'':22} -> {each.remedy}")
    found = [each.level for _, each in report]
    lines.append(f"{found.count(PROBLEM)} problems, {found.count(WARNING)} warnings")
    return "\n".join(lines)


if __name__ == "__main__":
    entry.run(main)
