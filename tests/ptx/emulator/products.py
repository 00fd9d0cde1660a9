"""Emulate the matrix instructions of one program: ldmatrix, stmatrix, mma and wgmma."""

from __future__ import annotations

import numpy as np

from tests.ptx.emulator.accesses import SHARED_BASE, Accesses
from tests.ptx.emulator.memory import Stop
from tests.ptx.emulator.words import F32, F64, I32, I64, U8, U16, U32, widen


class Products(Accesses):
    """Adds the matrix instructions to `Accesses`."""

    def ldmatrix(self, address, count, transposed, where):
        """Load `count` 8 x 8 matrices of 16-bit words, and return one register for each.

        Lanes 8 n ... 8 n + 7 of a warp hold the addresses of the rows of matrix n.
        """
        a = address.reshape(self.W, 32)[:, : 8 * count].reshape(-1)
        warp = np.repeat(np.arange(self.W), 8 * count)
        b = a.view(I32).astype(I64) - SHARED_BASE
        if (b < 0).any() or (b + 16 > self.shared_limit).any() or (b % 16).any():
            self.f.add("ldmatrix out of bounds or misaligned", where, f"program {self.cta}")
            raise Stop("ldmatrix")
        at = b // 16
        self.check_reads(at, warp, 16, where)
        rows = self.shared.reshape(-1, 16)[at].view(U16).reshape(self.W, count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(rows).view(U32).reshape(self.W, count, 32)
        return [np.ascontiguousarray(words[:, n]).reshape(-1) for n in range(count)]

    def stmatrix(self, address, registers, transposed, where):
        count = len(registers)
        a = address.reshape(self.W, 32)[:, : 8 * count].reshape(-1)
        warp = np.repeat(np.arange(self.W), 8 * count)
        b = a.view(I32).astype(I64) - SHARED_BASE
        if (b < 0).any() or (b + 16 > self.shared_limit).any() or (b % 16).any():
            self.f.add("stmatrix out of bounds or misaligned", where, f"program {self.cta}")
            raise Stop("stmatrix")
        at = b // 16
        words = np.stack([x.reshape(self.W, 32) for x in registers], 1)  # [W, count, 32]
        rows = np.ascontiguousarray(words).view(U16).reshape(self.W, count, 8, 8)
        if transposed:
            rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2))
        values = rows.reshape(-1, 8).view(U8)
        self.check_same(at, values, where, "shared")
        self.check_writes(at, warp, 16, where)
        self.shared.reshape(-1, 16)[at] = values
        self.mark(at, warp, 16)

    def mma(self, a, b, c, kind, k, where):
        """Compute a b + c for m16n8k16, and return the result as four fp32 registers.

        `a` has four registers, `b` two, each with two 16-bit numbers. `c` has four fp32 registers.
        For k = 8, `a` has two registers and `b` one.
        """
        W, halves = self.W, k // 8
        A = np.stack(a).view(U16).reshape(halves, 2, W, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
        B = np.stack(b).view(U16).reshape(halves, W, 8, 4, 2).transpose(1, 0, 3, 4, 2)
        A, B = widen(A.reshape(W, 16, k), kind), widen(B.reshape(W, k, 8), kind)
        C = np.stack(c).view(F32).reshape(2, 2, W, 8, 4).transpose(2, 0, 3, 4, 1).reshape(W, 16, 8)
        D = (np.matmul(A.astype(F64), B.astype(F64)) + C).astype(F32)
        D = D.reshape(W, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, self.L)
        return list(np.ascontiguousarray(D).view(U32))

    def descriptor(self, d, rows, trans, where):
        """Return where the operand of a descriptor lies, as indices [rows, 16] of 16-bit words.

        The indices count from the start of shared memory.
        """
        d = int(d)
        start, lead, stride = (d & 0x3FFF) << 4, (d >> 16 & 0x3FFF) << 4, (d >> 32 & 0x3FFF) << 4
        mode, base = d >> 62 & 3, d >> 49 & 7
        if mode == 0 or base:
            raise Stop(f"wgmma descriptor {d:#x}: no swizzle, or a base offset")
        wide = {1: 64, 2: 32, 3: 16}[mode]  # 16-bit elements of a swizzled row
        r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        if trans:  # rows run along memory
            offset = r // wide * lead + k // 8 * stride + k % 8 * (2 * wide) + r % wide * 2
        else:
            offset = r // 8 * stride + r % 8 * (2 * wide) + k * 2
        address = start + offset
        bits = {1: 7, 2: 3, 3: 1}[mode]
        address = address ^ ((address >> 7 & bits) << 4)
        at = address - SHARED_BASE
        if (at < 0).any() or (at + 2 > self.shared_limit).any():
            self.f.add("wgmma operand out of bounds", where, f"program {self.cta}")
            raise Stop("wgmma")
        return at // 2

    def wgmma(self, a, b, c, use_c, n, kind, trans_a, trans_b, where):
        """Compute a b (+ c) for m64 n k16, and return the result as n/2 fp32 registers.

        Args:
            a: Four registers, or one register with a shared-memory descriptor.
            b: A register with a shared-memory descriptor.
            c: N/2 fp32 registers.
            use_c: Whether to add c.
        """
        groups = self.L // 128
        out = []
        for w in range(groups):
            here = slice(128 * w, 128 * w + 128)
            if isinstance(a, list):
                A = np.stack([x[here] for x in a]).view(U16).reshape(2, 2, 4, 8, 4, 2)
                A = A.transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)
            else:
                A = self._operand(a, here, 64, trans_a, w, where)
            B = self._operand(b, here, n, trans_b, w, where)
            A, B = widen(A, kind).astype(F64), widen(B, kind).astype(F64)
            D = A @ B.T
            if use_c:
                C = np.stack([x[here] for x in c]).view(F32)  # [n/2, 128]
                C = C.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)
                D = D + C
            D = D.astype(F32).reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
            out.append(np.ascontiguousarray(D).view(U32).reshape(n // 2, 128))
        return list(np.ascontiguousarray(np.concatenate(out, 1)))

    def _operand(self, d, here, rows, trans, group, where):
        mine = d[here]
        if (mine != mine[0]).any():
            raise Stop("wgmma descriptor differs within a warpgroup")
        at = self.descriptor(mine[0], rows, trans, where)
        byte = (at[..., None] * 2 + np.arange(2)).reshape(-1)
        if self.races:
            if self.inflight[byte].any():
                self.f.add(
                    "wgmma reads before its copy was waited for", where, f"program {self.cta}"
                )
            for how, what in ((1, "stores"), (2, "cp.async copies")):
                if (self.unfenced[byte] == how).any():
                    self.f.add(
                        f"wgmma reads {what} without fence.proxy.async",
                        where,
                        f"program {self.cta}",
                    )
            if not self.written[byte].all():
                self.f.add("wgmma reads what was never written", where, f"program {self.cta}")
            fresh = self.write_epoch[byte] == self.epoch
            others = self.write_warp[byte] // 4 != group if self.W > 4 else fresh
            if (fresh & others).any() or (fresh.any() and self.W == 4):
                self.f.add(
                    "race: wgmma after another warp's write, no barrier",
                    where,
                    f"program {self.cta}",
                )
            self.async_read[byte] += 1
            self.wgroups[-1].append(byte)
            for w in range(4 * group, 4 * group + 4):
                self.read_epoch[w, byte] = self.epoch
        return self.shared.view(U16)[at]

    def wgmma_commit(self):
        self.wgroups.append([])

    def wgmma_wait(self, keep):
        ready = max(0, len(self.wgroups) - 1 - keep)
        for group in self.wgroups[:ready]:
            for byte in group:
                self.async_read[byte] -= 1
                for w in range(self.W):  # the read ended now, not when it was started
                    self.read_epoch[w, byte] = np.maximum(self.read_epoch[w, byte], self.epoch)
        del self.wgroups[:ready]
