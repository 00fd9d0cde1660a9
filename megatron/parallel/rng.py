"""Random streams.

Two kinds, never mixed: initial values come from a generator that depends on (seed, parameter name)
alone, so they do not depend on the layout; dropout comes from torch's global generators, whose
state is saved per rank. Tensor-parallel ranks hold the same hidden states, so their generators run
alike; only what they compute apart, the dropout of their own heads, is drawn from a stream of the
rank's own (`rank_dropout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.parallel.groups import TensorGroup


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that is a pure function of `seed` and `name`.

    Drawing on the CPU keeps the values independent of the device; drawing the full tensor and then
    slicing keeps them independent of tensor parallelism.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return generator


def rng_state() -> dict[str, torch.Tensor]:
    """State of this rank's dropout streams, as uint8 tensors keyed by device kind."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned; a CUDA state is ignored where there is no CUDA device."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextmanager
def rank_dropout(tp: TensorGroup, device: torch.device) -> Iterator[None]:
    """Draws inside differ between the ranks of `tp`; outside they stay alike.

    The rank's seed is drawn from the common CPU stream, so nothing besides the global generators
    is to be saved, and recomputing an activation draws the same numbers again. In a group of one
    nothing happens.
    """
    if tp.size == 1:
        yield
        return
    seed = int(torch.randint(0, 1 << 40, ()))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.manual_seed(seed * tp.size + tp.rank)
        yield
