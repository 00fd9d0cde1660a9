"""Emulate the memory accesses of one program: loads, stores and asynchronous copies."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.ptx.emulator.memory import BASE, Stop
from tests.ptx.emulator.words import I8, I32, I64, U8, U32, U64

SHARED_BASE = 1024  # as on the hardware, which keeps the first KB for itself


class Accesses:
    """The memory state of one CTA (thread block, Triton's program), with its loads and stores."""

    def __init__(
        self, memory, findings, threads, shared_bytes, ctaid, grid, noise=True, races=True
    ):
        self.g, self.f, self.L, self.noise, self.races = memory, findings, threads, noise, races
        self.ctaid, self.grid = ctaid, grid
        self.cta = ctaid[1] * grid[0] + ctaid[0]
        self.W = max(1, threads // 32)
        self.S = (shared_bytes + 15) // 16 * 16
        self.shared = np.full(self.S, 0xFF, U8)  # 0xFFFF: NaN in fp16, bf16 and (in pairs) fp32
        self.shared_limit = shared_bytes
        self.written = np.zeros(self.S, bool)
        self.inflight = np.zeros(self.S, bool)
        self.async_read = np.zeros(self.S, I32)  # wgmma groups that still read here
        self.write_epoch = np.full(self.S, -1, I32)
        self.write_warp = np.zeros(self.S, I8)
        self.read_epoch = np.full((self.W, self.S), -1, I32)
        self.unfenced = np.zeros(
            self.S, I8
        )  # since the last proxy fence written by: 1 stores, 2 copies
        self.epoch = 0
        self.groups: list[list] = [[]]  # copies: the last list is open
        self.wgroups: list[list] = [[]]
        self.lane = np.arange(threads, dtype=U32)
        self.warp = (np.arange(threads) // 32).astype(I64)
        self.counts: Counter = Counter()

    def _g(self, address, n, guard, what, where):
        a = (address - U64(BASE)).view(I64)
        lanes = None
        if guard is not None:
            if not guard.any():
                return None, None
            if not guard.all():
                lanes = np.flatnonzero(guard)
                a = a[lanes]
        bad = (a < 0) | (a + n > self.g.size)
        inside = np.where(bad, 0, a)
        bad |= ~(self.g.valid[inside] & self.g.valid[np.minimum(inside + n - 1, self.g.size - 1)])
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            self.f.add(
                f"out of bounds ({what})",
                where,
                f"program {self.cta}, {int(bad.sum())} lanes, first: {self.g.where(int(a[k]))}",
            )
            keep = ~bad
            lanes = np.flatnonzero(keep) if lanes is None else lanes[keep]
            a = a[keep]
        odd = a % n != 0
        if odd.any():
            self.f.add(
                f"misaligned ({what})",
                where,
                f"program {self.cta}, {n} bytes at {hex(int(a[odd][0]))}",
            )
            raise Stop("misaligned")
        return a // n, lanes

    def ldg(self, address, n, guard, where):
        """Load n bytes from global memory in each of L lanes, and return them as [L, n].

        Lanes that load nothing, because of their guard or a fault, get the bits of a NaN.
        """
        at, lanes = self._g(address, n, guard, "load", where)
        if at is None:
            return np.full((self.L, n), 0xFF, U8)
        w = self.g.writer.reshape(-1, n)[at]
        if ((w >= 0) & (w != self.cta)).any():
            self.f.add(
                "read of what another program of this launch wrote", where, f"program {self.cta}"
            )
        self.g.read_by.reshape(-1, n)[at] = self.cta
        values = self.g.bytes.reshape(-1, n)[at]
        if lanes is None:
            return values
        out = np.full((self.L, n), 0xFF, U8)
        out[lanes] = values
        return out

    def stg(self, address, values, guard, where):
        n = values.shape[1]
        at, lanes = self._g(address, n, guard, "store", where)
        if at is None:
            return
        values = values if lanes is None else values[lanes]
        self.check_same(at, values, where, "global")
        w = self.g.writer.reshape(-1, n)
        if ((w[at] >= 0) & (w[at] != self.cta)).any():
            self.f.add("two programs write one address", where, f"program {self.cta}")
        r = self.g.read_by.reshape(-1, n)[at]
        if ((r >= 0) & (r != self.cta)).any():
            self.f.add("write of what another program read", where, f"program {self.cta}")
        w[at] = self.cta
        self.g.bytes.reshape(-1, n)[at] = values

    def check_same(self, at, values, where, space):
        one, first, inverse = np.unique(at, return_index=True, return_inverse=True)
        if len(one) < len(at) and (values != values[first][inverse]).any():
            self.f.add(
                f"lanes store different values to one {space} address", where, f"program {self.cta}"
            )

    def _s(self, address, n, guard, what, where):
        a = (
            address.view(I32).astype(I64) - SHARED_BASE
            if address.dtype == U32
            else address.view(I64) - SHARED_BASE
        )
        lanes = None
        if guard is not None and not guard.all():
            if not guard.any():
                return None, None
            lanes = np.flatnonzero(guard)
            a = a[lanes]
        bad = (a < 0) | (a + n > self.shared_limit)
        if bad.any():
            self.f.add(
                f"out of bounds (shared {what})", where, f"{int(a[bad][0])} of {self.shared_limit}"
            )
            raise Stop("shared memory out of bounds")
        if (a % n).any():
            self.f.add(
                f"misaligned (shared {what})", where, f"{n} bytes at {int(a[a % n != 0][0])}"
            )
            raise Stop("misaligned")
        return a // n, lanes

    def check_reads(self, at, warp, n, where):
        if not self.races:
            return
        if self.inflight.reshape(-1, n)[at].any():
            self.f.add(
                "read of shared memory before its copy was waited for", where, f"program {self.cta}"
            )
        if not self.written.reshape(-1, n)[at].all():
            self.f.add("note: read of shared memory never written", where, f"program {self.cta}")
        fresh = self.write_epoch.reshape(-1, n)[at] == self.epoch
        if fresh.any() and (fresh & (self.write_warp.reshape(-1, n)[at] != warp[:, None])).any():
            self.f.add(
                "race: read after another warp's write, no barrier", where, f"program {self.cta}"
            )
        self.read_epoch.reshape(self.W, -1, n)[warp, at] = self.epoch

    def check_writes(self, at, warp, n, where):
        if not self.races:
            return
        if self.inflight.reshape(-1, n)[at].any():
            self.f.add(
                "write to shared memory that a copy still owns", where, f"program {self.cta}"
            )
        if self.async_read.reshape(-1, n)[at].any():
            self.f.add(
                "write to shared memory that a wgmma still reads", where, f"program {self.cta}"
            )
        fresh = self.write_epoch.reshape(-1, n)[at] == self.epoch
        if fresh.any() and (fresh & (self.write_warp.reshape(-1, n)[at] != warp[:, None])).any():
            self.f.add("race: two warps write, no barrier", where, f"program {self.cta}")
        recent = self.read_epoch.reshape(self.W, -1, n)[:, at] == self.epoch
        if recent.any():
            recent[warp, np.arange(len(at))] = False
            if recent.any():
                self.f.add(
                    "race: write after another warp's read, no barrier",
                    where,
                    f"program {self.cta}",
                )

    def mark(self, at, warp, n, how=1):
        if self.races:
            self.write_epoch.reshape(-1, n)[at] = self.epoch
            self.write_warp.reshape(-1, n)[at] = warp[:, None]
            self.written.reshape(-1, n)[at] = True
            self.unfenced.reshape(-1, n)[at] = how

    def lds(self, address, n, guard, where):
        at, lanes = self._s(address, n, guard, "load", where)
        if at is None:
            return np.full((self.L, n), 0xFF, U8)
        self.check_reads(at, self.warp if lanes is None else self.warp[lanes], n, where)
        values = self.shared.reshape(-1, n)[at]
        if lanes is None:
            return values
        out = np.full((self.L, n), 0xFF, U8)
        out[lanes] = values
        return out

    def sts(self, address, values, guard, where):
        n = values.shape[1]
        at, lanes = self._s(address, n, guard, "store", where)
        if at is None:
            return
        warp = self.warp if lanes is None else self.warp[lanes]
        values = values if lanes is None else values[lanes]
        self.check_same(at, values, where, "shared")
        self.check_writes(at, warp, n, where)
        self.shared.reshape(-1, n)[at] = values
        self.mark(at, warp, n)

    def barrier(self):
        self.epoch += 1

    def proxy_fence(self):
        self.unfenced[:] = 0

    def cp_async(self, shared_address, global_address, n, size, guard, where):
        """Start an asynchronous copy of n bytes per lane from global to shared memory.

        Args:
            size: The bytes to copy per lane, 0 or n; with 0, zeros are written. None copies n.
        """
        at, lanes = self._s(shared_address, n, guard, "copy", where)
        if at is None:
            return
        every = np.arange(self.L) if lanes is None else lanes
        take = np.ones(self.L, bool) if size is None else size > 0
        if size is not None and ((size != 0) & (size != n)).any():
            raise Stop("cp.async with part of its bytes")
        full = take if guard is None else take & guard
        values = self.ldg(global_address, n, full, where)
        values[~full] = 0
        values, warp = values[every], self.warp[every]
        self.check_same(at, values, where, "shared")
        self.check_writes(at, warp, n, where)
        # Until it is waited for, the place holds neither the old nor the new bytes.
        self.shared.reshape(-1, n)[at] = 0xFF
        self.inflight.reshape(-1, n)[at] = True
        self.mark(at, warp, n)
        self.groups[-1].append((at, values, warp, n))

    def cp_commit(self):
        self.groups.append([])

    def cp_wait(self, keep: int):
        """Complete the copies of all committed groups except the last `keep` groups."""
        ready = max(0, len(self.groups) - 1 - keep)
        for group in self.groups[:ready]:
            for at, values, warp, n in group:
                self.shared.reshape(-1, n)[at] = values
                self.inflight.reshape(-1, n)[at] = False
                self.mark(at, warp, n, 2)
        del self.groups[:ready]

    def cp_wait_all(self):
        self.cp_commit()
        self.cp_wait(0)
