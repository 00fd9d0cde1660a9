"""Rehearse a job: run it once as each of its ranks, and check that their communication matches."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from megatron.config import Config
from megatron.errors import UserError
from megatron.rehearsal.fake_ranks import Played, play_all
from megatron.rehearsal.narrow import narrow
from megatron.rehearsal.rendezvous import Strand, unmatched


class RehearsalError(UserError):
    """A rank of the rehearsed job failed, or its communication does not match other ranks."""


def rehearse(load: Callable[..., Config], train: Callable[[Config], object]) -> str:
    """Run `train` once as each rank of the job, with a small model, and return a summary as text.

    The ranks do not really communicate. Their collectives and messages are recorded, and then
    compared.

    Args:
        load: A function that returns the config with the given config overrides.
        train: A function that joins the job, trains, validates and saves.

    Raises:
        RehearsalError: A rank failed, or the operations of two ranks do not match.
        ConfigError: The config of the small model is not valid.
    """
    torch.set_num_threads(1)
    config = load()
    size, stages = config.parallel.world_size, config.parallel.pipe_parallel_size
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        small = load(*narrow(config, Path(name)))
        ranks: list[Played] = []
        playing = play_all(lambda: train(small), size, stages, Path(name), os.cpu_count() or 1)
        for played in tqdm(playing, "rehearsed", size, unit=" ranks", mininterval=1):
            ranks.append(played)
            if ranks[0].error:
                raise RehearsalError(f"rank 0 fails:\n{ranks[0].error.rstrip()}")
    strands = [
        Strand(rank, thread, "fails" if played.error else "has ended")
        for rank, played in enumerate(ranks)
        for thread in played.threads or [[]]
    ]
    members = {text: found for played in ranks for text, found in played.members.items()}
    problem = unmatched(strands, members)
    failed = [f"rank {n} fails:\n{x.error.rstrip()}" for n, x in enumerate(ranks) if x.error]
    if problem and failed:
        # Without the message that it waits for, a rank goes on with zeros, and may fail later.
        problem += f"\nand {failed[0].partition(':')[0]}: {failed[0].rpartition(chr(10))[2]}"
    if problem or failed:
        raise RehearsalError(problem or failed[0])
    events = sum(len(each.events) for each in strands)
    return (
        f"{size} ranks rehearsed a step, a validation and a save: all their {events:,} collectives "
        "and messages fit together"
    )
