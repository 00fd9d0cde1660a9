"""Measure the memory that torch allocates on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(call: Callable[[], object], folder: Path) -> int:
    """Return the peak number of bytes that torch has allocated and not yet freed during a call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
