"""Translate a parsed PTX kernel to a Python function that emulates one CTA (thread block).

A register becomes a variable that holds a numpy array with one lane per thread. Arrays are never
changed in place. All threads must take the same branches. A guarded instruction changes only the
lanes for which its guard is true. `operands` describes registers, and `arithmetic` the methods
`op_x`.
"""

from __future__ import annotations

import struct

import numpy as np

from tests.ptx.emulator import words
from tests.ptx.emulator.arithmetic import Arithmetic
from tests.ptx.emulator.memory import Stop
from tests.ptx.emulator.operands import UNSIGNED, pair, vector
from tests.ptx.emulator.parser import WIDTH


class Generator(Arithmetic):
    """Adds instructions on memory, warps and matrices, and puts all statements into a function."""

    def generate(self):
        """Return (the function, its source text).

        The function takes the `Program`, the kernel's parameters and the registers' first values.
        """
        labels = {block.label: n for n, block in enumerate(self.k.blocks)}
        body: list[str] = []
        for n, block in enumerate(self.k.blocks):
            self.lines = [f"c.counts[{n}] += 1"]
            ended = False
            for ins in block.body:
                ended |= self.statement(ins, labels, n + 1)
            if not ended:
                self.lines.append(f"pc = {n + 1}")
            body.append(f"{'if' if n == 0 else 'elif'} pc == {n}:")
            body += [f"    {line}" for line in self.lines]
        registers = self.k.registers
        head = ["def run(c, params, poison):", "    L = c.L", "    pc = 0"]
        head += [
            f"    {v} = poison[{registers[r]}]" for r, v in self.names.items() if r in registers
        ]
        lines = [*head, "    while True:", *(f"        {line}" for line in body)]
        text = "\n".join([*lines, "        else:", "            return"])
        scope = vars(words) | {"np": np, "B": np.bool_} | self.consts
        exec(compile(text, f"<ptx {self.k.name}>", "exec"), scope)
        return scope["run"], text

    def statement(self, ins, labels, following: int) -> bool:
        """Translate an instruction, and return whether it ends its basic block.

        Args:
            labels: Label -> number of the block.
            following: The number of the next block.
        """
        guard = None
        if ins.guard:
            name = self.var(ins.guard.lstrip("!"))
            guard = f"(~{name})" if ins.guard.startswith("!") else name
        op = ins.op.split(".")
        if op[0] == "bra":
            target = labels[ins.args[0][1]]
            choice = f" if c.uniform({guard}, {ins.text!r}) else {following}" if guard else ""
            self.lines.append(f"pc = {target}{choice}")
            return True
        if op[0] in ("ret", "exit"):
            if guard:
                raise Stop("guarded return")
            self.lines.append("return")
            return True
        try:
            translate = getattr(self, f"op_{op[0]}")
            translate(op, ins.args, guard, repr(f"{ins.line}: {ins.text}"))
        except (Stop, KeyError, AttributeError, IndexError) as error:
            problem = f"{type(error).__name__} {error}"
            raise Stop(f"line {ins.line}: {ins.text}: {problem}") from error
        return False

    # --- memory -------------------------------------------------------------------------------
    def op_ld(self, op, a, g, where):
        ty = op[-1]
        if "param" in op:
            index = [name for _, name in self.k.params].index(a[1][1][1])
            self.put(a[0], f"np.full(L, params[{index}])", ty, g)
            return
        outs, bits = vector(a[0]), WIDTH[ty]
        call = "c.ldg" if space(op) == "global" else "c.lds"
        bytes_ = bits // 8 * len(outs)
        self.lines.append(f"t = {call}({self.space_address(a[1])}, {bytes_}, {g}, {where})")
        self.lines.append(f"t = t.view({UNSIGNED[bits]})")
        for n, out in enumerate(outs):
            extended = f"{'s' if ty[0] == 's' else 'b'}{bits}"
            self.put(out, f"np.ascontiguousarray(t[:, {n}])", extended, g)

    def op_st(self, op, a, g, where):
        call = "c.stg" if space(op) == "global" else "c.sts"
        values = f"np.stack([{self.listed(vector(a[1]), f'b{WIDTH[op[-1]]}')}], 1).view(U8)"
        self.lines.append(f"{call}({self.space_address(a[0])}, {values}, {g}, {where})")

    def op_cp(self, op, a, g, where):
        if "commit_group" in op:
            self.lines.append("c.cp_commit()")
        elif "wait_group" in op:
            self.lines.append(f"c.cp_wait({a[0][1]})")
        elif "wait_all" in op:
            self.lines.append("c.cp_wait_all()")
        elif op[1] == "async" and op[2] in ("ca", "cg"):
            size = self.full(a[3], "u32") if len(a) > 3 else "None"
            places = f"{self.address(a[0], 'u32')}, {self.address(a[1], 'u64')}"
            self.lines.append(f"c.cp_async({places}, {a[2][1]}, {size}, {g}, {where})")
        else:
            raise Stop("cp")

    def op_bar(self, op, a, g, where):
        if "warp" in op:
            return
        if g or "sync" not in op or len(a) > 1:
            raise Stop("this kind of barrier")
        self.lines.append("c.barrier()")

    op_barrier = op_bar

    def op_fence(self, op, a, g, where):
        if "proxy" in op:
            self.lines.append("c.proxy_fence()")

    def ignored(self, op, a, g, where):
        pass

    op_membar = op_nanosleep = op_griddepcontrol = op_setmaxnreg = ignored

    # --- warps --------------------------------------------------------------------------------
    def op_shfl(self, op, a, g, where):
        out, valid = pair(a[0])
        self.lines.append(f"t, ok = c.shfl({op[2]!r}, {self.listed(a[1:4], 'u32')}, {where})")
        self.put(out, "t", "b32", g)
        if valid:
            self.put(valid, "ok", "pred", g)

    def op_redux(self, op, a, g, where):
        self.put(a[0], f"c.redux({self.full(a[1], op[-1])}, {op[2]!r})", op[-1], g)

    def op_vote(self, op, a, g, where):
        if op[2] != "ballot":
            raise Stop("vote")
        self.put(a[0], f"c.ballot({self.full(a[1], 'pred')})", "b32", g)

    # --- matrices -----------------------------------------------------------------------------
    def results(self, outs, g):
        for n, out in enumerate(outs):
            self.put(out, f"t[{n}]", "b32", g)

    def op_ldmatrix(self, op, a, g, where):
        outs = vector(a[0])
        place = self.address(a[1], "u32")
        self.lines.append(f"t = c.ldmatrix({place}, {len(outs)}, {'trans' in op}, {where})")
        self.results(outs, g)

    def op_stmatrix(self, op, a, g, where):
        registers = self.listed(vector(a[1]), "b32")
        place = self.address(a[0], "u32")
        self.lines.append(f"c.stmatrix({place}, [{registers}], {'trans' in op}, {where})")

    def op_mma(self, op, a, g, where):
        shape, types = next(o for o in op if o.startswith("m16")), op[-4:]
        if shape != "m16n8k16" or types[0] != "f32" or types[1] not in ("f16", "bf16"):
            raise Stop("mma")
        x, y, z = (self.listed(operand[1], "b32") for operand in a[1:4])
        self.lines.append(f"t = c.mma([{x}], [{y}], [{z}], {types[1]!r}, 16, {where})")
        self.results(a[0][1], g)

    def op_wgmma(self, op, a, g, where):
        if "fence" in op:
            return
        if "commit_group" in op:
            self.lines.append("c.wgmma_commit()")
            return
        if "wait_group" in op:
            self.lines.append(f"c.wgmma_wait({a[0][1]})")
            return
        shape, kind = next(o for o in op if o.startswith("m64")), op[-1]
        n, k = shape.split("n")[1].split("k")
        if k != "16" or kind not in ("f16", "bf16") or op[-3] != "f32":
            raise Stop("wgmma")
        outs, left, right, use = a[0][1], a[1], a[2], a[3]
        registers = left[0] == "vec"
        x = f"[{self.listed(left[1], 'b32')}]" if registers else self.full(left, "u64")
        flags = [o[1] for o in a[4:]]  # scale-a, scale-b, then trans-a (descriptors only), trans-b
        if flags[:2] != [1, 1]:
            raise Stop("wgmma scales")
        trans = [0, *flags[2:]] if registers else flags[2:]
        y, z = self.full(right, "u64"), f"[{self.listed(outs, 'b32')}]"
        added = self.full(use, "pred") if use[0] == "reg" else f"np.full(L, {bool(use[1])})"
        flagged = f"{n}, {kind!r}, {bool(trans[0])}, {bool(trans[1])}"
        added = f"c.uniform({added}, {where})"
        self.lines.append(f"t = c.wgmma({x}, {y}, {z}, {added}, {flagged}, {where})")
        self.results(outs, g)


def space(op: list[str]) -> str:
    """Return the state space of a load or store, "global" or "shared"."""
    return next(o.split("::")[0] for o in op if o.startswith(("global", "shared")))


def poisons(lanes: int) -> dict[int, np.ndarray]:
    """Return width in bits -> the value that registers have before they are first written."""
    return {1: np.zeros(lanes, bool), 16: np.full(lanes, 0x7FFF, np.uint16),
            32: np.full(lanes, words.POISON32, np.uint32),
            64: np.full(lanes, 0x7FF8DEADDEADDEAD, np.uint64)}  # fmt: skip


def parameter(kind: str, value) -> np.generic:
    """Return an argument of a kernel as the bits that its register holds."""
    if kind == "f32":
        return np.uint32(struct.unpack("I", struct.pack("f", value))[0])
    bits = WIDTH[kind]
    return np.dtype(f"u{bits // 8}").type(int(value) % (1 << bits))
