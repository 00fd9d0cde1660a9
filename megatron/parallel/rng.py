"""Manage the random streams for initial values and for dropout.

Initial values come from a generator that depends only on the seed and the parameter's name, so they
do not depend on the parallel layout. Dropout masks come from torch's global generators. Their seed
is a hash of the run's seed and the rank's stream. (A sum of the run's seed and the rank would be
worse: rank 1 of one run would draw the masks of rank 0 of the run with the next seed.) The state of
these generators is saved in the checkpoint for each rank. Tensor-parallel ranks have the same
hidden states, and must draw the same dropout masks for these hidden states. Therefore the global
generators of these ranks must be in the same state at all times. Random numbers that should differ
between these ranks come from a separate stream of each rank (`rank_dropout`). For example, each
rank has different attention heads, and uses its own stream for their dropout.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.parallel.groups import TensorGroup


def named_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose state depends only on `seed` and `name`."""
    # Callers draw the full tensor on the CPU and slice it, so that no value depends on the device.
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, name))
    return generator


def derived_seed(seed: int, name: str) -> int:
    """Return a seed of 63 bits, which is a hash of `seed` and `name`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the states of this rank's global random generators.

    The states are uint8 tensors with the keys `cpu` and, if CUDA is available, `cuda`.
    """
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Set the states of this rank's global random generators.

    `state` has the keys `cpu` and, optionally, `cuda`. Without CUDA, `cuda` is ignored.
    """
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextmanager
def rank_dropout(tp: TensorGroup, device: torch.device) -> Iterator[None]:
    """Within the `with` block, let each rank of `tp` draw its own random numbers."""
    if tp.size == 1:
        yield
        return
    # All these ranks draw the same number. Therefore a checkpoint needs only the states of the
    # global generators, and recomputing an activation draws the same numbers again.
    seed = int(torch.randint(0, 1 << 40, ()))
    devices = [] if device.type == "cpu" else [device]
    # After the block, all ranks have equal states again.
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.manual_seed(seed * tp.size + tp.rank)
        yield
