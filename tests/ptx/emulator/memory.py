"""Define the global memory of an emulated launch, and the findings of its execution."""

from __future__ import annotations

import numpy as np

from tests.ptx.emulator.words import I32, U8

BASE = 0x7F0000000000
GUARD = 1 << 16


class Stop(Exception):
    """The emulation cannot continue, for example at a divergent branch or unknown instruction."""


class Global:
    """The memory of all tensors of a launch. Between them are zones that must not be accessed."""

    def __init__(self):
        self.pieces: list[tuple[int, np.ndarray]] = []
        self.size = GUARD
        self.names: list[tuple[int, int, str]] = []

    def add(self, data: np.ndarray, name: str) -> int:
        """Copy the bytes of a tensor into the memory, and return their address."""
        at = self.size
        self.pieces.append((at, data))
        self.names.append((at, at + data.size, name))
        self.size += (data.size + 255) // 256 * 256 + GUARD
        return BASE + at

    def freeze(self) -> None:
        self.bytes = np.full(self.size, 0xFF, U8)
        self.valid = np.zeros(self.size, bool)
        self.writer = np.full(self.size, -1, I32)
        self.read_by = np.full(self.size, -1, I32)
        for at, data in self.pieces:
            self.bytes[at : at + data.size] = data
            self.valid[at : at + data.size] = True

    def back(self, address: int, count: int) -> np.ndarray:
        return self.bytes[address - BASE : address - BASE + count]

    def where(self, offset: int) -> str:
        for a, b, name in self.names:
            if a - GUARD <= offset < b + GUARD:
                return f"{name}{offset - a:+d} of {b - a} bytes"
        return hex(offset)


class Findings:
    def __init__(self):
        self.seen: dict[tuple[str, str], list] = {}

    def add(self, kind: str, where: str, detail: str) -> None:
        entry = self.seen.setdefault((kind, where), [0, detail])
        entry[0] += 1

    def __bool__(self):
        return bool(self.seen)

    def lines(self):
        return [f"{k} x{n}: {d}   at [{w}]" for (k, w), (n, d) in self.seen.items()]
