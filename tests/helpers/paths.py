"""The paths of the project, its test data and its configurations."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
