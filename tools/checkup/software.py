"""Check the installed software and the GPUs, and report what the config value `auto` selects.

Every import is inside its check, because a package may be missing or broken.
"""

import contextlib
import importlib
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from megatron.shipped import ROOT
from tools.checkup.finding import OK, PROBLEM, WARNING, Case, Finding, judged


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def python(case: Case) -> Iterator[Finding]:
    yield Finding(OK, f"{platform.python_version()} on {platform.platform()}")


def packages(case: Case) -> Iterator[Finding]:
    """Check that torch, DeepSpeed and Triton can be imported, and have versions that are supported.

    pyproject.toml lists the supported versions.
    """
    texts = ((ROOT / f"requirements{end}.txt").read_text() for end in ("", "-dev"))
    pins = dict(re.findall(r"^(\w+)==(\S+)$", "".join(texts), re.M))
    project = (ROOT / "pyproject.toml").read_text()
    ranges = {name: ends for name, *ends in re.findall(r'"(\w+)>=(.*),<(.*)"', project)}
    for name in ("torch", "deepspeed", "triton"):
        level = WARNING if name == "triton" and not case.gpu else PROBLEM
        install = f"pip install {name}=={pins[name]}"
        if name == "triton":
            install += ", or the version that your build of torch requires"
        if (found := _version(name)) is None:
            yield Finding(level, f"{name} is not installed", install)
        elif why := _import_error(name):
            yield Finding(level, f"{name} {found} cannot be imported: {why}", install)
        else:
            low, high = ranges[name]
            other = not _numbers(low) <= _numbers(found) < _numbers(high)
            text = f"{name} {found}, supported: from {low} on, below {high}"
            yield judged(other, text, install, WARNING)
            if name == "triton":
                yield from _safe_on_hopper(found)


def _import_error(name: str) -> str:
    """Import a package without output. Return the first line of the error, or "" if none occurs."""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            importlib.import_module(name)
    except Exception as error:  # a broken package may fail in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _safe_on_hopper(found: str) -> Iterator[Finding]:
    from megatron.attention.fused import SAFE_ON_HOPPER

    if _numbers(found) < _numbers(SAFE_ON_HOPPER):
        hopper = any(capability[0] == 9 for capability in _capabilities())
        text = f"triton {found} lets Hopper's matrix products read data before it has arrived"
        newer = f"pip install triton=={SAFE_ON_HOPPER} or newer"
        yield Finding(PROBLEM if hopper else WARNING, text, newer)


def _capabilities() -> list[tuple[int, int]]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(index) for index in range(count)]


def gpus(case: Case) -> Iterator[Finding]:
    import torch
    import torch.cuda.nccl

    from megatron.engine.gpus import driver_version

    driver = driver_version()
    if not case.gpu:
        text = "torch sees no GPU" + (", but the machine has a driver" if driver else "")
        remedy = "install the CUDA build of torch; see CUDA_VISIBLE_DEVICES, docker's --gpus all"
        yield judged(driver, text, f"{remedy} (docs/troubleshooting.md)")
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding(OK, f"CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver or '?'}")
    for index, capability in enumerate(_capabilities()):
        free, total = torch.cuda.mem_get_info(index)
        text = (
            f"{index}: {torch.cuda.get_device_name(index)}, {capability[0]}.{capability[1]}, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
        yield judged(capability < (8, 0), text, "the fused kernels need 8.0 or newer", WARNING)
        text, remedy = f"{index}: others use its memory", "`nvidia-smi` names them: end them"
        if free < 0.9 * total:
            yield Finding(WARNING, text, remedy)
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(i)]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    text = f"{len(pairs) - len(apart)} of {len(pairs)} pairs of GPUs are linked"
    remedy = (
        "without links NCCL copies through the host: see `nvidia-smi topo -m`, and ACS in the BIOS"
    )
    yield judged(apart, text, remedy, WARNING)


def compiler(case: Case) -> Iterator[Finding]:
    """Check that a C compiler and Python's headers are installed. On a GPU, Triton needs both."""
    level = PROBLEM if case.gpu else WARNING
    remedy = "apt-get install g++ python3-dev" + (
        "" if case.gpu else " (a run on a CPU needs none)"
    )
    names = (os.environ.get("CC") or "gcc", "cc", "clang")
    found = next((path for name in names if (path := shutil.which(name))), None)
    yield judged(not found, f"C compiler: {found or 'none'}", remedy, level)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield judged(not header.exists(), f"Python's headers: {header}", remedy, level)


def choices(case: Case) -> Iterator[Finding]:
    """Report which attention backend and which optimizer a run of the config would use.

    Without a config, report only which attention backend `kerple_log` would use.
    """
    import torch

    device = "cuda" if case.gpu else "cpu"
    if case.config is None:
        from megatron.attention import choose
        from megatron.positional import load

        dtype = torch.bfloat16 if case.gpu else torch.float32
        attend = choose("auto", load("kerple_log"), device_type=device, dtype=dtype)
        yield Finding(OK, f"attention: {attend.name} ({attend.reason})")
        return
    from megatron.engine.build import describe_attention, plan_of

    precision = case.config.training.precision
    plan = plan_of(case.config, 256, device_type=device, eod=0)
    for line in describe_attention([layer.attend for layer in plan.layers]):
        yield Finding(OK, line)
    yield judged(
        precision == "fp16" and not case.gpu, f"precision: {precision}",
        "fp16 needs a GPU: write `precision: fp32`",
    )  # fmt: skip
    from megatron.engine.training.optimizer import optimizer_kind

    o = case.config.optimizer
    kind, why = optimizer_kind(o.type, precision, case.config.parallel.zero_stage)
    yield Finding(OK, f"optimizer: {why or kind}")
