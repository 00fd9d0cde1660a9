"""Say what differs between two runs, and from which step on their losses do.

    python tools/compare_runs.py RUN_A RUN_B

The tool compares the last starts in the run.json of both folders (commit, changes, versions, hosts,
environment, the values that fix the samples), the keys of both config.yml, and the rows of
metrics.jsonl that both have. The names of the runs, their folders, commands and times are left
out. The exit code is 0 if nothing differs, and 1 otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron import entry
from megatron.errors import UserError
from megatron.files import parse_json, read_small
from megatron.run_folder import MOST_BYTES, RunFolder

OWN = ("save", "load", "run", "time", "command", "from", "from_run", "folder", "step")
"""The config keys and the entries of a start that differ between any two runs."""
COMPARED = ("loss", "lr", "grad_norm", "samples")
"""Words in the names of the metrics that are compared."""


@entry.reports()
def main() -> int:
    """Print the differences, and return exit code 1 if there are any, otherwise 0."""
    parser = entry.parser(__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folder")
    a, b = map(RunFolder, parser.parse_args().runs)
    (start_a, patch_a), (start_b, patch_b) = origin(a), origin(b)
    lines = [
        *differences("", start_a, start_b),
        *difflib.unified_diff(patch_a, patch_b, "patch of A", "patch of B", "", "", 0, ""),
        *differences("config ", config(a), config(b)),
        *later_losses(a, b),
    ]
    print("\n".join(lines) or "nothing differs")
    return 1 if lines else 0


def origin(run: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """Return the last start in the run's `run.json`, and the lines of its patch.

    Raises:
        UserError: The file is missing or damaged.
    """
    try:
        found = parse_json(read_small(run.provenance, MOST_BYTES))
        start = {**found["starts"][-1]}
        return start, str(found["patches"].get(start["code"]["patch"], "")).splitlines()
    except FileNotFoundError:
        raise UserError(
            f"{run.provenance}: missing; is {run.path} the `save` folder of a run of this version?"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{run.provenance}: damaged ({error!r})") from None


def config(run: RunFolder) -> dict[str, Any]:
    """Return the content of the run's `config.yml`.

    Raises:
        UserError: The file is damaged.
    """
    try:
        return dict(yaml.safe_load(read_small(run.config, MOST_BYTES)))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{run.config}: damaged ({error})") from None


def differences(before: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield `BEFOREkey.inner: VALUE_A | VALUE_B` for each value that differs in nested dicts."""
    for key in [*a, *(key for key in b if key not in a)]:
        one, other = a.get(key, "-"), b.get(key, "-")
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(f"{before}{key}.", one, other)
        elif key not in OWN and one != other:
            yield f"{before}{key}: {one} | {other}"


def later_losses(*runs: RunFolder) -> Iterator[str]:
    """Yield a line for each metric that differs, with the first step at which it does."""
    a, b = (
        {
            (name, row["step"]): value
            for row in run.metrics_rows()
            for name, value in row.items()
            if any(word in name for word in COMPARED)
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
