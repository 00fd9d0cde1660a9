"""Report what differs between two runs, and from which step on their losses differ.

    python tools/compare_runs.py RUN_A RUN_B

The tool compares three files of both run folders:

- run.json: the last start of the run (commit, changes, versions, hosts, environment, and the values
  that determine the samples);
- config.yml: all keys;
- metrics.jsonl: the rows for steps that are in both files.

The names of the runs, their folders, commands, times and Slurm jobs are not compared. How long
threads spin is not compared either. The exit code is 0 if nothing differs, and 1 otherwise.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron import entry

# isort: split
import yaml

from megatron.errors import UserError
from megatron.files import parse_json, read_small
from megatron.run_folder import MOST_BYTES, RunFolder

OWN = ("save", "load", "run", "time", "command", "from", "from_run", "folder", "step")
"""The config keys and the entries of a start that differ between any two runs."""
OF_JOB = ("SLURM_JOB", "GOMP_SPINCOUNT")
"""Beginnings of the environment variables that differ between any two jobs."""
COMPARED = ("loss", "lr", "grad_norm", "samples")
"""Words in the names of the metrics that are compared."""


@entry.reports
def main() -> int:
    """Print the differences between two runs. Return exit code 1 if there are any, otherwise 0."""
    parser = entry.parser(__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folder")
    a, b = (RunFolder(path) for path in parser.parse_args().runs)
    (start_a, patch_a, config_a), (start_b, patch_b, config_b) = contents(a), contents(b)
    lines = [
        *differences("", start_a, start_b),
        *difflib.unified_diff(patch_a, patch_b, "patch of A", "patch of B", "", "", 0, ""),
        *differences("config ", config_a, config_b),
        *later_losses(a, b),
    ]
    print("\n".join(lines) or "nothing differs")
    return 1 if lines else 0


def contents(run: RunFolder) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return those contents of a run folder that the tool compares.

    Returns:
        (record of the last start, lines of the patch with uncommitted code changes, config).

    Raises:
        UserError: A file is missing or damaged.
    """
    # The files are `run.json`, the patch and `config.yml`.
    path = run.provenance
    try:
        found = parse_json(read_small(path, MOST_BYTES))
        start = {**found["starts"][-1]}
        patch = str(found["patches"].get(start["code"]["patch"], ""))
        path = run.config
        return start, patch.splitlines(), dict(yaml.safe_load(read_small(path, MOST_BYTES)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not that of a run of this version ({error})") from None


def differences(before: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of text for each value that differs between two nested dicts.

    Args:
        before: The text with which each line begins.
        a, b: The dicts.
    """
    # The line is `BEFOREkey.inner: VALUE_A | VALUE_B`.
    for key in [*a, *(key for key in b if key not in a)]:
        one, other = a.get(key, "-"), b.get(key, "-")
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(f"{before}{key}.", one, other)
        elif key not in OWN and not str(key).startswith(OF_JOB) and one != other:
            yield f"{before}{key}: {one} | {other}"


def later_losses(*runs: RunFolder) -> Iterator[str]:
    """Yield a line of text for each metric whose values differ between the runs.

    The line contains the first step at which the values differ, and both values at this step.
    """
    a, b = (
        {
            (name, row["step"]): value
            for row in run.metrics_rows()
            for name, value in row.items()
            if any(word in name for word in COMPARED) and not name.endswith("_per_second")
        }
        for run in runs
    )
    common = sorted((key for key in a if key in b), key=lambda key: key[1])
    if not common:
        yield "no step has metrics in both runs"
    for metric in dict.fromkeys(name for name, _ in common):
        steps = [step for name, step in common if name == metric]
        if other := [step for step in steps if a[metric, step] != b[metric, step]]:
            step, equal = other[0], steps.index(other[0])
            values = f"{a[metric, step]} | {b[metric, step]}"
            yield f"{metric}: equal in {equal} rows, from step {step} on {values}"
    last = [max((step for _, step in found), default=0) for found in (a, b)]
    if last[0] != last[1]:
        yield f"last step with metrics: {last[0]} | {last[1]}"


if __name__ == "__main__":
    entry.run(main)
