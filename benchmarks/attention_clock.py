"""Time and memory of a call on a GPU (or, to try the benchmark out, on a CPU)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CYCLES = 2_000_000
"""Of a GPU's clock in a millisecond, roughly, and rather too many."""


LASTING = ("an illegal", "misaligned address", "launch failure", "device-side assert")
"""In CUDA's messages about errors that every later call meets too."""


class Clock:
    """Milliseconds that the device works on a call, the L2 cache cold.

    A GPU first writes 256 MB, which empties the cache, and spins while the host prepares and
    queues the call, so that what the host takes is not measured: in a training step the queue is
    full as well. `host_ms`, how long queueing took, must have been measured before.
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
        """Megabytes that the call adds to those in use, at its highest, its results included."""
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
        """Of a bf16 product of two [8192, 8192]: what the machine gives at best."""
        if not self.cuda:
            return None
        size = 8192
        a, b = torch.randn(2, size, size, device=self.device, dtype=torch.bfloat16).unbind()
        times = [self.device_ms(lambda: a @ b, 1.0) for _ in range(13)]
        return 2 * size**3 / sorted(times[3:])[5] / 1e9


def tidy(device: torch.device) -> None:
    """Give back memory that nothing uses any more."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def broken(error: Exception) -> bool:
    """Whether the device will answer nothing more to this process."""
    return any(words in str(error) for words in LASTING)


def reason(error: Exception) -> str:
    """The first telling line of an error's message, for a table's cell."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {text}"[:160].replace("|", "/")
