"""Random streams.

There are two kinds. Initial values come from a generator that depends only on the seed and the
parameter's name, so they do not depend on the layout. Dropout comes from torch's global generators,
whose state is saved per rank. Tensor-parallel ranks hold the same hidden states, so their global
generators stay in the same state. Values that differ between the ranks, such as the dropout of
their attention heads, are drawn from a separate stream of each rank (`rank_dropout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.parallel.groups import TensorGroup


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that is a pure function of `seed` and `name`.

    Callers draw the full tensor on the CPU and slice it, so values depend neither on the device nor
    on tensor parallelism.
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
    """Restore a `state` from `rng_state`; a CUDA state is ignored without a CUDA device."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextmanager
def rank_dropout(tp: TensorGroup, device: torch.device) -> Iterator[None]:
    """Inside, the ranks of `tp` draw different numbers; outside, their generators stay equal.

    The seed of each rank's stream is drawn from the common CPU stream. Therefore a checkpoint needs
    only the global generators, and recomputing an activation draws the same numbers again. In a
    group of one this does nothing.
    """
    if tp.size == 1:
        yield
        return
    seed = int(torch.randint(0, 1 << 40, ()))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.manual_seed(seed * tp.size + tp.rank)
        yield
