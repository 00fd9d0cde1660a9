"""Set up every test: fixed seeds, one thread, no network for wandb, and the mark `gpu`.

Without a GPU, Triton's kernels run in its interpreter. Triton decides this when it is imported, so
its environment variable is set here. On a bare GPU machine (with only torch, triton and pytest),
`-m gpu` collects only `tests/gpu`, which needs nothing else.
"""

from __future__ import annotations

import gc
import gzip
import importlib.util
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Everything that is imported and collected stays until the end, so a search for garbage among it
# finds nothing. `pytest_collection` ends this.
gc.disable()

# Set before torch is imported, and inherited by every process of a test. Ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_ERROR_REPORTING"] = "false"
# Hundreds of processes import the project; without its bytecode each would compile all of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

GPU_COMMAND = "python -m pytest -m gpu"
GPU_TESTS = Path(__file__).parent / "gpu"
SLOW_FILES = [
    "test_launched_training",
    "test_matrix",
    "test_rehearsal",
    "test_layouts",
    "test_checks",
    "test_failure",
    "test_kernels_against_float64",
    "test_change_layout",
    "test_documents",
    "test_tensor_parallel",
    "test_pipeline",
    "test_fused_training",
    "test_kernels_compile",
    "test_sequence_cuts",
    "test_theta_options",
    "test_ptx",
    "test_jobs",
    "test_preemption",
    "test_one_writer",
    "test_launchers",
    "test_check_parity",
    "test_uneven_ranks",
    "test_data_download",
    "test_attention_benchmark",
    "test_async_save",
    "test_install",
    "test_theta_bounds",
    "test_one_fails",
    "test_fuzz_runs",
    "test_your_model",
    "test_torch_compile",
    "test_data_interrupted",
    "test_loss_per_token",
    "test_train_step_benchmark",
    "test_arena",
]
"""They run first, or at the end of a parallel run one process would work while the others wait."""

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Few and always the same examples; HYPOTHESIS_PROFILE=search tries many new ones each time.
    settings.register_profile(
        "house",
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # a busy machine is not a defect
    )
    settings.register_profile("search", max_examples=1000, deadline=None, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    # Without a GPU, `torch.manual_seed` notes the whole stack for later, which takes 0.5 ms.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Return the folder of the committed test data."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def gpt2_files(fixtures, tmp_path_factory) -> tuple[Path, Path]:
    """Return the paths of GPT-2's vocab.json and merges.txt; the first is made from the second."""
    folder = tmp_path_factory.mktemp("gpt2")
    merges = gzip.decompress((fixtures / "data" / "gpt2-merges.txt.gz").read_bytes()).decode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable]
    symbols += [chr(256 + n) for n in range(256 - len(printable))]
    merged = ["".join(line.split()) for line in merges.split("\n")[1:] if line]
    vocabulary = {token: i for i, token in enumerate([*symbols, *merged, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, collect only `tests/gpu`."""
    if config.option.markexpr != "gpu":
        return None
    inside = collection_path == GPU_TESTS or GPU_TESTS in collection_path.parents
    return None if inside or collection_path in GPU_TESTS.parents else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from later garbage collections.

    DeepSpeed starts many, and each would take half a second.
    """
    collected = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # Python's own 700 take 3% of the time of the tests
    return collected


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist keep our order; its own begins with the files that have the most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        reason = f"needs a CUDA GPU: run `{GPU_COMMAND}` on a machine that has one"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
