"""Translate operands of PTX instructions to Python expressions over numpy arrays.

Registers are local variables that hold unsigned bits (uint16/32/64) or booleans.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.emulator import words
from tests.ptx.emulator.accesses import SHARED_BASE
from tests.ptx.emulator.memory import Stop
from tests.ptx.emulator.parser import WIDTH, Kernel

UNSIGNED = {1: "B", 8: "U8", 16: "U16", 32: "U32", 64: "U64"}
VIEW = {"s8": "I8", "s16": "I16", "s32": "I32", "s64": "I64", "f16": "F16", "f32": "F32",
        "f64": "F64", "u8": "U8", "u16": "U16", "u32": "U32", "u64": "U64", "b8": "U8",
        "b16": "U16", "b32": "U32", "b64": "U64", "f16x2": "U32", "bf16x2": "U32",
        "bf16": "U16"}  # fmt: skip
SPECIAL = {"%tid.x": "c.lane", "%tid.y": "np.zeros(L, U32)", "%tid.z": "np.zeros(L, U32)",
           "%ntid.x": "np.full(L, U32(L))", "%laneid": "(c.lane & U32(31))",
           "%warpid": "(c.lane >> U32(5))"}  # fmt: skip
for _n, _axis in enumerate("xyz"):
    SPECIAL[f"%ctaid.{_axis}"] = f"np.full(L, U32(c.ctaid[{_n}]))"
    SPECIAL[f"%nctaid.{_axis}"] = f"np.full(L, U32(c.grid[{_n}]))"


class Operands:
    """Translates operands, and collects the constants, variable names and statements needed."""

    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.consts: dict[str, np.generic] = {}
        self.lines: list[str] = []
        self.names: dict[str, str] = {}

    def var(self, reg: str) -> str:
        if reg not in self.names:
            self.names[reg] = "v_" + reg.replace("%", "").replace(".", "_").replace("$", "_")
        return self.names[reg]

    def const(self, value: np.generic) -> str:
        for name, old in self.consts.items():
            if type(old) is type(value) and old.tobytes() == value.tobytes():
                return name
        key = f"k_{type(value).__name__}_{len(self.consts)}"
        self.consts[key] = value
        return key

    def src(self, operand, ty: str) -> str:
        """Return an operand as an expression of the PTX type `ty` (`pred` is bool)."""
        kind = operand[0]
        if kind == "not":
            return f"~{self.src(operand[1], 'pred')}"
        if kind == "reg":
            return self._register(operand[1], ty)
        if kind == "sym":
            if operand[1] != "global_smem":
                raise Stop(f"symbol {operand[1]}")
            return self.const(np.dtype(f"u{WIDTH[ty] // 8}").type(SHARED_BASE))
        if ty == "pred":
            return self.const(np.bool_(operand[1]))
        return self._literal(operand, ty)

    def _register(self, reg: str, ty: str) -> str:
        if reg in SPECIAL:
            text, have = SPECIAL[reg], 32
        elif reg in self.k.registers:
            text, have = self.var(reg), self.k.registers[reg]
        else:
            raise Stop(f"unknown register {reg}")
        if ty == "pred":
            return text
        want = WIDTH[ty]
        if want < have:
            text = f"{text}.astype({UNSIGNED[want]})"
        elif want > have:
            raise Stop(f"{reg} is narrower than {ty}")
        return text if VIEW[ty] == UNSIGNED[want] else f"{text}.view({VIEW[ty]})"

    def _literal(self, operand, ty: str) -> str:
        kind, bits, want = operand[0], WIDTH[ty], getattr(words, VIEW[ty])
        if kind == "int":
            raw = np.array([operand[1] & ((1 << bits) - 1)], dtype=f"u{bits // 8}")
            return self.const(raw.view(want)[0])
        if kind == "float":
            raw = np.array([operand[1]], dtype=f"u{operand[2] // 8}")
            if bits == operand[2]:
                return self.const(raw.view(want)[0])
            return self.const(want(raw.view(words.F32 if operand[2] == 32 else words.F64)[0]))
        if kind == "decimal":
            return self.const(want(operand[1]))
        raise Stop(f"operand {operand}")

    def full(self, operand, ty: str) -> str:
        """Return the same as `src`, but always an array over lanes, never a scalar."""
        text = self.src(operand, ty)
        return text if operand[0] in ("reg", "not") else f"np.full(L, {text})"

    def listed(self, operands, ty: str) -> str:
        """Return the expressions of several operands (see `full`), separated by commas."""
        return ", ".join(self.full(operand, ty) for operand in operands)

    def put(self, operand, expr: str, ty: str, guard: str | None) -> None:
        """Add a statement that assigns `expr`, of the PTX type `ty`, to the register `operand`."""
        reg = operand[1]
        if operand[0] == "reg" and reg == "_":
            return
        name, have = self.var(reg), self.k.registers[reg]
        if ty != "pred":
            if VIEW[ty] != UNSIGNED[WIDTH[ty]]:
                expr = f"({expr}).view({UNSIGNED[WIDTH[ty]]})"
            if WIDTH[ty] < have:  # loads and conversions extend
                signed = f".view({VIEW[ty]}).astype(I{have}).view(U{have})"
                expr = f"({expr})" + (signed if ty.startswith("s") else f".astype(U{have})")
            elif WIDTH[ty] > have:
                raise Stop(f"{ty} into {have} bits")
        if guard:
            expr = f"np.where({guard}, {expr}, {name})"
        self.lines.append(f"{name} = {expr}")

    def address(self, mem, ty: str) -> str:
        """Return the expression of a memory operand's address, an unsigned integer type `ty`."""
        _, base, offset = mem
        text = self.full(base, ty)
        if not offset:
            return text
        word = np.dtype(f"u{WIDTH[ty] // 8}").type(offset % (1 << WIDTH[ty]))
        return f"({text} + {self.const(word)})"

    def space_address(self, mem) -> str:
        """Return the same as `address`, in 32 bits if the operand's register has 32, else 64."""
        base = mem[1]
        narrow = base[0] == "sym" or (base[0] == "reg" and self.k.registers[base[1]] == 32)
        return self.address(mem, "u32" if narrow else "u64")


def vector(operand) -> list:
    """Return the registers of an operand, which may be a vector or a single register."""
    return operand[1] if operand[0] == "vec" else [operand]


def pair(operand) -> tuple:
    """Return (first, second or None) of a destination, which may be a pair or one register."""
    return (operand[1], operand[2]) if operand[0] == "pair" else (operand, None)
