"""Say which files are mutated, and which test files must find the mutants of each.

The tests of a file are those of the mirrored folder that import it, and those of `ALSO`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

MUTATED = [
    "megatron/engine/training",
    "megatron/evaluation",
    "megatron/parallel/loss.py",
    "megatron/plan",
    "tools/experiments/claims.py",
]
_TRAINING = "tests/engine/training"
ALSO = {
    "megatron/engine/training/bad_loss.py": [f"{_TRAINING}/test_fp16_scale.py"],
    "megatron/engine/training/batches.py": [f"{_TRAINING}/test_loss_per_token.py"],
    "megatron/engine/training/deepspeed_engine.py": [
        "tests/engine/test_engine_settings.py",
        f"{_TRAINING}/test_bad_gradient.py",
        "tests/distributed/test_theta_bounds.py",
    ],
    "megatron/engine/training/optimizer.py": ["tests/test_nvidia_apex.py"],
    "megatron/engine/training/pipeline_engine.py": ["tests/distributed/test_pipeline.py"],
    "megatron/engine/training/speed.py": ["tests/engine/run_log/test_sinks.py"],
    "megatron/engine/training/step_log.py": [f"{_TRAINING}/test_bad_loss.py"],
    "megatron/engine/training/trained_theta.py": [
        "tests/distributed/test_theta_bounds.py",
        "tests/distributed/test_theta_options.py",
    ],
    "megatron/evaluation/held_out.py": [
        "tests/evaluation/test_held_out.py",
        "tests/engine/checkpoint/test_published_start.py",
    ],
    "megatron/evaluation/suite/suite_report.py": ["tests/evaluation/suite/test_suite.py"],
}


def mutated_files(root: Path) -> list[str]:
    """Return the files that are mutated, as paths from `root`."""
    found = []
    for name in MUTATED:
        path = root / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


def covering(root: Path, source: str) -> list[str]:
    """Return the test files that must find the mutants of `source`, as paths from `root`."""
    module = source.removesuffix(".py").replace("/", ".")
    folder = (
        root / "tests" / Path(source).relative_to("megatron").parent
        if source.startswith("megatron/")
        else root / "tests" / Path(source).parent
    )
    while not folder.is_dir():
        folder = folder.parent
    mirrored = sorted(folder.rglob("test_*.py"))
    found = [str(p.relative_to(root)) for p in mirrored if module in _imported(p)]
    return found + [name for name in ALSO.get(source, []) if name not in found]


@cache
def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
