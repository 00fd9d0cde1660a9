"""Select the checkout of this project whose kernels are compiled (option `--project`)."""

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
    """Make later imports take `megatron` and `tools` from the checkout `project`."""
    for package in (megatron, tools):
        package.__path__ = [str(project.resolve() / package.__name__)]
