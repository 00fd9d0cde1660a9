"""Measure the time and memory of a call on a GPU (or on a CPU, to test the benchmark itself)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CYCLES = 3_000_000
"""At least the number of clock cycles of a GPU in a millisecond."""


LASTING = ("an illegal", "misaligned address", "launch failure", "device-side assert")
"""Parts of CUDA's messages about errors after which every later call of the process fails too."""


class Clock:
    """Measures how many milliseconds the device works on a call, starting with a cold L2 cache.

    Before a call, a GPU writes 256 MB, which empties the cache. It then spins while the host queues
    the call, so that the host's time is not measured. In a training step, too, the host is ahead of
    the GPU. `device_ms` must be given the time that the host needs, as `host_ms` measures it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
            self.start = torch.cuda.Event(enable_timing=True)
            self.end = torch.cuda.Event(enable_timing=True)

    def host_ms(self, call: Callable[[], object]) -> float:
        self.wait()
        begun = time.perf_counter()
        call()
        taken = 1e3 * (time.perf_counter() - begun)
        self.wait()
        return taken

    def device_ms(self, call: Callable[[], object], host_ms: float) -> float:
        if not self.cuda:
            return self.host_ms(call)
        self.flush.zero_()
        torch.cuda._sleep(int(CYCLES * min(1.5 * host_ms + 0.1, 50.0)))
        self.start.record()
        call()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)

    def peak_mb(self, call: Callable[[], object]) -> float | None:
        """Return the peak memory in MB that the call allocates, including its results."""
        if not self.cuda:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        results = call()
        self.wait()
        del results
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def matmul_tflops(self) -> float | None:
        """Return the TFLOP/s of a bf16 product of two [8192, 8192], a practical maximum."""
        if not self.cuda:
            return None
        size = 8192
        a, b = torch.randn(2, size, size, device=self.device, dtype=torch.bfloat16).unbind()
        times = [self.device_ms(lambda: a @ b, 1.0) for _ in range(13)]
        return 2 * size**3 / sorted(times[3:])[5] / 1e9


def tidy(device: torch.device) -> None:
    """Free memory that is no longer used, including torch's cache on the GPU."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def broken(error: Exception) -> bool:
    """Return whether the device fails every later call of this process after `error`."""
    return any(words in str(error) for words in LASTING)


def reason(error: Exception) -> str:
    """Return the first line of an error's message, shortened for a cell of a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {text}"[:160].replace("|", "/")
