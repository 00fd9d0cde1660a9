"""Rehearse a job: run it as every rank, and check that all ranks communicate as they must."""

from __future__ import annotations

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
    """Ranks of the rehearsed job do not communicate as they must, or one fails."""


def rehearse(load: Callable[..., Config], train: Callable[[Config], object]) -> str:
    """Run `train` as every rank of the job, on a small model, and return a text about it.

    Args:
        load: A function from config overrides to the config.
        train: A function that joins the job, trains, validates and saves.

    Raises:
        RehearsalError: A rank failed, or an operation of a rank has no partner.
        ConfigError: The small model breaks a rule of the config.
    """
    torch.set_num_threads(1)
    config = load()
    size, stages = config.parallel.world_size, config.parallel.pipe_parallel_size
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        small = load(*narrow(config, folder))
        ranks: dict[int, Played] = {}
        playing = play_all(lambda: train(small), size, stages, folder, os.cpu_count() or 1)
        for rank, played in tqdm(playing, "rehearsed", size, unit=" ranks", mininterval=1):
            ranks[rank] = played
            if played.error and rank == 0:
                break  # so the others would fail, too
    failed = [rank for rank in sorted(ranks) if ranks[rank].error]
    strands = [
        Strand(rank, thread, "fails" if rank in failed else "has ended")
        for rank in sorted(ranks)
        for thread in ranks[rank].threads
    ]
    members = {text: found for each in ranks.values() for text, found in each.members.items()}
    problem = unmatched(strands, members) if len(ranks) == size else ""
    if failed:
        error = ranks[failed[0]].error.rstrip()
        # Without the message that it waits for, a rank goes on with zeros, and may fail later.
        problem = problem + "\nand " if problem else ""
        error = error.rpartition("\n")[2] if problem else error
        problem += f"rank {failed[0]} fails:\n{error}"
    if problem:
        raise RehearsalError(problem)
    events = sum(len(each.events) for each in strands)
    return (
        f"{size} ranks rehearsed a step, a validation and a save: all their {events:,} collectives "
        "and messages fit together"
    )
