"""Where the project, its tests' data and its configurations are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
