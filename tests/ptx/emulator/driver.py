"""Define a Triton driver that executes launched kernels in the emulator, on CPU tensors.

After `install(80)`, a launch `function[grid](...)` compiles for sm_80, and the emulator executes
the PTX. Triton binds arguments, specialises and compiles as for a real GPU.
"""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel

from tests.ptx import hazards
from tests.ptx.emulator.codegen import Generator, parameter, poisons
from tests.ptx.emulator.machine import Program
from tests.ptx.emulator.memory import Findings, Global
from tests.ptx.emulator.parser import parse

LOG: list[dict] = []
"""One entry for each launch, with the kernel's name and the emulator's findings."""
OPTIONS = {"noise": True, "races": True}
PTX: dict[str, tuple] = {}
"""SHA-256 of a PTX text -> the result of `built` for this text."""


def built(text: str):
    """Parse and translate a PTX text, and cache the result.

    Returns:
        (parsed kernel, Python function that emulates a program, line -> register hazard of wgmma).
    """
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in PTX:
        kernel = parse(text)
        run, _ = Generator(kernel).generate()
        PTX[key] = (kernel, run, hazards.check(text)[0] if "wgmma" in text else {})
    return PTX[key]


class Launcher:
    """The callable by which Triton launches a compiled kernel."""

    def __init__(self, compiled: CompiledKernel):
        self.compiled = compiled

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter, exit_, *args):
        signature, meta = self.compiled.src.signature, self.compiled.metadata
        arguments = [
            (name, value)
            for (name, kind), value in zip(signature.items(), args, strict=True)
            if kind != "constexpr"
        ]
        ptx, name = self.compiled.asm["ptx"], self.compiled.name
        execute(ptx, (x, y, z), arguments, meta.shared, name)


def storage_bytes(t: torch.Tensor) -> np.ndarray:
    s = t.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(s)
    return flat.numpy()


def execute(ptx, grid, arguments, shared, name) -> None:
    """Emulate all programs of a launch on copies of the tensors, then copy the results back."""
    kernel, run, hazardous = built(ptx)
    memory, findings, found = Global(), Findings(), {}
    for line, what in hazardous.items():
        findings.add("wgmma register used before its wait", str(line), what)
    values = []
    for label, value in arguments:
        if isinstance(value, torch.Tensor):
            data, key = storage_bytes(value), value.untyped_storage().data_ptr()
            if key not in found:
                found[key] = (memory.add(data, label), data)
            value = found[key][0] + value.storage_offset() * value.element_size()
        values.append(value)
    memory.freeze()
    run_programs(kernel, run, values, memory, findings, shared, grid)
    for address, data in found.values():
        data[:] = memory.back(address, data.size)
    LOG.append({"name": name, "findings": findings})


def run_programs(kernel, run, values, memory, findings, shared, grid, first=0) -> None:
    """Emulate the programs of a grid one after the other, numbered from `first`."""
    values = [*values, *[0] * (len(kernel.params) - len(values))]
    params = [parameter(kind, v) for (kind, _), v in zip(kernel.params, values, strict=True)]
    poison = poisons(kernel.threads)
    with np.errstate(all="ignore"):
        for part, n in product(range(grid[1]), range(first, first + grid[0])):
            at = (n, part, 0)
            program = Program(memory, findings, kernel.threads, shared, at, grid, **OPTIONS)
            run(program, params, poison)
            if any(program.groups):
                findings.add("note: copies never waited for", kernel.name, f"program {at}")


class Utils:
    """The device properties that Triton asks for."""

    def get_device_properties(self, device):
        return {
            "max_shared_mem": 232448,
            "multiprocessor_count": 108,
            "warpSize": 32,
            "max_num_regs": 65536,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


class Driver(DriverBase):
    """Triton's active driver, which launches on the emulator instead of a device."""

    def __init__(self, capability):
        self.capability, self.utils = capability, Utils()
        self.launcher_cls = None
        self.get_current_device = lambda: 0
        self.set_current_device = lambda d: None
        self.get_current_stream = lambda d: 0
        self.get_device_capability = lambda d=0: (capability // 10, capability % 10)

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def assemble_tensormap_to_arg(self, *a):
        raise NotImplementedError


def install(capability: int) -> None:
    """Make Triton and this project use the emulator as a GPU of this compute capability."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # so that torch.empty is full of NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    triton.runtime.driver.set_active(Driver(capability))

    def handles(self):
        if getattr(self, "module", None) is None:
            self.module, self.function, self._run = "emulated", "emulated", Launcher(self)
            self.n_regs = self.n_spills = self.n_max_threads = 0

    CompiledKernel._init_handles = handles
    from megatron.kernels import launch

    choose = launch.choose
    launch.choose = lambda _, *rest: choose((capability // 10, capability % 10), *rest)
