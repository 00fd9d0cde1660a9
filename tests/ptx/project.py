"""Which checkout's kernels are compiled."""

from __future__ import annotations

import argparse
from pathlib import Path

import megatron
import tools

ROOT = Path(__file__).parents[2]


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--project", type=Path, default=ROOT, help="compile another checkout's kernels"
    )


def use(project: Path) -> None:
    """Take `megatron` and `tools` from this checkout; to be called before importing them."""
    for package in (megatron, tools):
        package.__path__ = [str(project.resolve() / package.__name__)]
