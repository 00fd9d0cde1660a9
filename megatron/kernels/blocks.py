"""Tile sizes, warps and pipeline stages of each pass: looked up, never searched for at start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.kernels.device import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """M query rows x N keys (``table``: M x M), warps of a program, stages of its loop."""

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Blocks:
    forward: Tile
    query: Tile
    key: Tile
    table: Tile


SMALL = Tile(16, 16, 4, 1)


def padded(head_size: int) -> int:
    """P: Triton's tiles are powers of two, its products at least 16 deep."""
    return max(16, 1 << (head_size - 1).bit_length())


def choose(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> Blocks:
    if INTERPRETED:
        return Blocks(SMALL, SMALL, SMALL, SMALL)
    t = Tile(64, 64, 4, 2)
    return Blocks(t, t, t, t)
