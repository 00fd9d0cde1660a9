"""List the peak rates and the memory of GPUs.

The rates are those of dense matrix products in TFLOP/s, from NVIDIA's data sheets. Each GPU has two
rates: tensor cores with 16-bit inputs and fp32 sums, and fp32 without tensor cores (torch's
default). Where a data sheet gives the rate of sparse matrices, this module has half of that rate.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.engine.errors import StartError
from megatron.suggest import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        rate16: The peak TFLOP/s of matrix products with 16-bit inputs.
        rate32: The peak TFLOP/s of matrix products with fp32 inputs.
        memory: The memory in GB.
        has_bf16: Whether the tensor cores support bf16.
    """

    rate16: float
    rate32: float
    memory: float
    has_bf16: bool = True


GPUS = {
    "V100": Gpu(125, 15.7, 32, has_bf16=False),  # Tesla V100 data sheet, 2020: SXM2
    "A100-40": Gpu(312, 19.5, 40),  # A100 data sheet, 2021
    "A100-80": Gpu(312, 19.5, 80),  # the same
    "H100-PCIe": Gpu(756, 51, 80),  # H100 data sheet, 2022: 1,513 sparse
    "H100-NVL": Gpu(835, 60, 94),  # H100 data sheet, 2024: 1,671 sparse
    "H100": Gpu(989, 67, 80),  # the same, SXM: 1,979 sparse
    "H200": Gpu(989, 67, 141),  # H200 data sheet, 2024, SXM: 1,979 sparse
    "B200": Gpu(2250, 75, 180),  # Blackwell data sheet, 2025, HGX B200: 4,500 sparse
    "L40S": Gpu(362, 91.6, 48),  # L40S data sheet, 2023
    "4090": Gpu(165, 82.6, 24),  # Ada architecture whitepaper, 2023: GeForce RTX 4090
}
"""Maps names to GPUs. The order matters, because `gpu_of_device` returns the first that fits."""


def gpu_named(name: str) -> Gpu:
    """Return the known GPU with this name. Case is ignored.

    Raises:
        StartError: The GPU is unknown.
    """
    gpu = {known.lower(): each for known, each in GPUS.items()}.get(name.lower())
    if gpu is None:
        hint = did_you_mean(name, GPUS)
        raise StartError(f"--gpu {name}: unknown; {hint}known: {', '.join(GPUS)}")
    return gpu


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU whose name fits CUDA's `device_name`, or None if it is unknown."""
    # A GPU fits if `device_name` contains all parts of the GPU's name in `GPUS`. Hyphens separate
    # the parts. The first GPU that fits counts.
    found = (gpu for name, gpu in GPUS.items() if all(x in device_name for x in name.split("-")))
    return next(found, None)


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver on this machine, or None if there is no driver."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s+(\S+)", file.read_text()) if file.exists() else None
    return found.group(1) if found else None
