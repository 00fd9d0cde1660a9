"""The paths of the project, its test data and its configurations."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CONFIGS = ROOT / "configs"
GRIDS = sorted(path for path in CONFIGS.rglob("*.yml") if "\naxes:" in path.read_text())
"""The files for tools/sweep.py."""
SHIPPED = sorted(
    path.relative_to(CONFIGS).as_posix() for path in {*CONFIGS.rglob("*.yml")} - {*GRIDS}
)
"""The other files of `CONFIGS`, from which runs are composed."""
