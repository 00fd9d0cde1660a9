"""Emulate one program (one CTA): its memory, barriers, copies, matrix products and warps.

A lane is a thread. Every value is a numpy array over the lanes of the CTA, stored as unsigned bits.
A finding is a fault that hardware would not report:

- an access that is out of bounds or misaligned;
- two warps that access one word of shared memory, at least one of them to write, without a barrier
  between the accesses;
- a read of memory that an asynchronous copy has not yet filled;
- stores of different values to one address by one instruction;
- two programs that write one address.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.emulator.memory import Stop
from tests.ptx.emulator.products import Products
from tests.ptx.emulator.words import F32, F64, I64, U32, flush


class Program(Products):
    """Adds instructions that exchange values between the lanes of a warp, and special functions."""

    def shfl(self, mode, value, b, c, where):
        lane = (self.lane & U32(31)).astype(I64)
        b, c = b.astype(I64), c.astype(I64)
        bound, segment = c & 31, c >> 8 & 31
        low = lane & segment
        high = (lane & segment) | (bound & ~segment & 31)
        b = b & 31
        if mode == "bfly":
            j, ok = lane ^ b, (lane ^ b) <= high
        elif mode == "up":
            j, ok = lane - b, (lane - b) >= high
        elif mode == "down":
            j, ok = lane + b, (lane + b) <= high
        else:
            j = low | (b & ~segment & 31)
            ok = j <= high
        j = np.where(ok, j, lane)
        return value[self.warp * 32 + j], ok

    def redux(self, value, how):
        x = value.reshape(self.W, 32)
        reduce = {
            "max": np.max,
            "min": np.min,
            "add": np.sum,
            "or": np.bitwise_or.reduce,
            "and": np.bitwise_and.reduce,
            "xor": np.bitwise_xor.reduce,
        }[how]
        return np.repeat(reduce(x, axis=1).astype(value.dtype), 32)

    def ballot(self, p):
        x = p.reshape(self.W, 32)
        return np.repeat((x * (1 << np.arange(32, dtype=I64))).sum(1).astype(U32), 32)

    def uniform(self, p, where):
        if p.all():
            return True
        if not p.any():
            return False
        self.f.add("branch not uniform", where, f"program {self.cta}")
        raise Stop(f"divergent branch: {where}")

    def error(self, x, bits):
        """Return a pseudo-random error in [-bits, bits) that depends only on x, as on hardware."""
        h = (x.view(U32) * U32(2654435761)) ^ (x.view(U32) >> U32(15))
        h = h * U32(2246822519)
        return (h.astype(F64) / 2.0**31 - 1.0) * bits

    def approx(self, name, x, ftz):
        x = flush(x) if ftz else x
        y = x.astype(F64)
        if name == "ex2":
            y = np.exp2(y)
            if self.noise:
                y = y * (1 + self.error(x, 2.0**-22))
        elif name == "lg2":
            y = np.log2(y)
            if self.noise:  # absolute 2^-22.6 within (0.5, 2), relative outside
                e = self.error(x, 2.0**-22.6)
                y = np.where((x > 0.5) & (x < 2.0), y + np.where(x == 1, 0, e), y * (1 + e))
        else:
            y = {
                "rcp": lambda v: 1 / v,
                "sqrt": np.sqrt,
                "rsqrt": lambda v: 1 / np.sqrt(v),
                "sin": np.sin,
                "cos": np.cos,
                "tanh": np.tanh,
            }[name](y)
            if self.noise and name in ("sin", "cos"):  # within a turn, absolute
                y = np.where(np.abs(x) <= 3.2, y + self.error(x, 2.0**-20.5), np.nan)
            elif self.noise:
                y = y * (1 + self.error(x, 2.0**-23))
        y = y.astype(F32)
        return flush(y) if ftz else y
