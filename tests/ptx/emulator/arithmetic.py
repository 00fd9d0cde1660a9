"""Translate arithmetic, comparisons, conversions and moves of PTX to statements of numpy.

A method `op_x` translates the instructions whose opcode begins with x. Its arguments are `op`, the
words of the opcode; `a`, the operands; `g`, the expression of the guard, or None; and `where`, the
text of the instruction for findings.
"""

from __future__ import annotations

from tests.ptx.emulator.memory import Stop
from tests.ptx.emulator.operands import VIEW, Operands, pair
from tests.ptx.emulator.parser import WIDTH

SIGNS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "mul": "*"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<",
           "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
ROUND = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def unsigned(ty: str) -> str:
    return ty.replace("s", "u") if ty[0] == "s" else ty


class Arithmetic(Operands):
    """Adds to `Operands` the instructions that act only on registers."""

    def binary(self, op, a, g, where):
        if op[-1] in ("f16x2", "bf16x2", "bf16", "f32x2"):
            raise Stop("packed arithmetic")
        ty = unsigned(op[-1])
        self.put(a[0], f"{self.full(a[1], ty)} {SIGNS[op[0]]} {self.src(a[2], ty)}", ty, g)

    op_add = op_sub = op_and = op_or = op_xor = binary

    def op_mul(self, op, a, g, where):
        ty = op[-1]
        if "wide" in op:
            x, y, wide = self.widened(a, ty)
            self.put(a[0], f"{x} * {y}", wide, g)
        elif "hi" in op and ty in ("u32", "s32"):
            x, y, wide = self.widened(a, ty)
            high = f"(({x} * {y}) >> {VIEW[wide]}(32)).astype({VIEW[ty]})"
            self.put(a[0], f"{high} + np.zeros(L, {VIEW[ty]})", ty, g)
        elif "hi" in op:
            raise Stop("the high half of a 64-bit product")
        else:
            self.binary(op, a, g, where)

    def widened(self, a, ty):
        """Return two operands as expressions of twice the width, and the wide type."""
        wide = f"{ty[0]}{2 * int(ty[1:])}"
        x, y = (f"{self.full(o, ty)}.astype({VIEW[wide]})" for o in a[1:3])
        return x, y, wide

    def op_mad(self, op, a, g, where):
        ty = op[-1]
        if "wide" in op:
            x, y, wide = self.widened(a, ty)
            self.put(a[0], f"{x} * {y} + {self.full(a[3], wide)}", wide, g)
        elif ty == "f32":
            self.op_fma(op, a, g, where)
        else:
            u = "u" + ty[1:]
            text = f"{self.full(a[1], u)} * {self.src(a[2], u)} + {self.src(a[3], u)}"
            self.put(a[0], text, u, g)

    def op_fma(self, op, a, g, where):
        if op[-1] != "f32":
            raise Stop(f"fma.{op[-1]}")
        self.put(a[0], f"fma32({self.listed(a[1:4], 'f32')})", "f32", g)

    def op_div(self, op, a, g, where):
        ty = op[-1]
        if ty == "f32":
            text = f"{self.full(a[1], ty)} / {self.src(a[2], ty)}"
        else:
            text = f"{'divide' if op[0] == 'div' else 'remainder'}({self.listed(a[1:3], ty)})"
        self.put(a[0], text, ty, g)

    op_rem = op_div

    def op_max(self, op, a, g, where):
        first, ty = op[0], op[-1]
        plain = ty[0] in "su" or "NaN" in op
        name = f"np.{first}imum" if plain else f"{first}num"
        self.put(a[0], f"{name}({self.full(a[1], ty)}, {self.src(a[2], ty)})", ty, g)

    op_min = op_max

    def unary(self, op, a, g, where):
        ty = op[-1]
        text = {"neg": "-{}", "abs": "np.abs({})", "not": "~{}"}[op[0]]
        self.put(a[0], text.format(self.full(a[1], ty)), ty, g)

    op_neg = op_abs = op_not = unary

    def op_shl(self, op, a, g, where):
        ty = op[-1]
        x, n = self.full(a[1], ty), self.full(a[2], "u32")
        self.put(a[0], f"shift({x}, {n}, {op[0] == 'shl'}, {WIDTH[ty]})", ty, g)

    op_shr = op_shl

    def op_shf(self, op, a, g, where):
        text = f"funnel({self.listed(a[1:4], 'u32')}, {'l' in op}, {'wrap' in op})"
        self.put(a[0], text, "b32", g)

    def op_lop3(self, op, a, g, where):
        if a[0][0] == "pair" or "and" in op[1:-1] or "or" in op[1:-1]:
            raise Stop("lop3 with a predicate")
        self.put(a[0], f"lop3({self.listed(a[1:4], 'u32')}, {a[4][1]})", "b32", g)

    def op_prmt(self, op, a, g, where):
        self.put(a[0], f"prmt({self.listed(a[1:4], 'u32')})", "b32", g)

    def op_bfe(self, op, a, g, where):
        if WIDTH[op[-1]] != 32:
            raise Stop("bfe of 64 bits")
        self.put(a[0], f"bfe({self.listed(a[1:4], 'u32')}, {op[-1] == 's32'})", "b32", g)

    def op_bfi(self, op, a, g, where):
        self.put(a[0], f"bfi({self.listed(a[1:5], 'u32')})", "b32", g)

    def op_selp(self, op, a, g, where):
        text = f"np.where({self.src(a[3], 'pred')}, {self.listed(a[1:3], op[-1])})"
        self.put(a[0], text, op[-1], g)

    def op_cvta(self, op, a, g, where):
        self.put(a[0], self.full(a[1], "u64"), "u64", g)

    def special(self, op, a, g, where):
        first, ty = op[0], op[-1]
        if ty != "f32":
            raise Stop(f"{first}.{ty}")
        x = self.full(a[1], ty)
        if "approx" in op or first in ("ex2", "lg2"):
            self.put(a[0], f"c.approx({first!r}, {x}, {'ftz' in op})", ty, g)
        else:
            self.put(a[0], {"rcp": "F32(1) / {}", "sqrt": "np.sqrt({})"}[first].format(x), ty, g)

    op_ex2 = op_lg2 = op_rcp = op_sqrt = op_rsqrt = op_sin = op_cos = op_tanh = special

    def op_mov(self, op, a, g, where):
        (out, x), ty = a, op[-1]
        if out[0] == "vec":  # unpack
            each = WIDTH[ty] // len(out[1])
            self.lines.append(f"t = {self.full(x, f'u{WIDTH[ty]}')}")
            for n, register in enumerate(out[1]):
                text = f"(t >> U{WIDTH[ty]}({n * each})).astype(U{each})"
                self.put(register, text, f"b{each}", g)
        elif x[0] == "vec":  # pack
            bits, each = WIDTH[ty], WIDTH[ty] // len(x[1])
            packed = (
                f"({self.full(o, f'b{each}')}.astype(U{bits}) << U{bits}({n * each}))"
                for n, o in enumerate(x[1])
            )
            self.put(out, " | ".join(packed), f"b{bits}", g)
        else:
            self.put(out, self.full(x, ty), ty, g)

    def op_setp(self, op, a, g, where):
        cmp, ty = op[1], op[-1]
        x, y = self.full(a[1], ty), self.src(a[2], ty)
        text = compared(cmp, x, y, ty)
        negated = f"~{text}"
        if len(a) > 3:
            with_, third = {"and": "&", "or": "|", "xor": "^"}[op[2]], self.full(a[3], "pred")
            negated, text = f"(~{text} {with_} {third})", f"({text} {with_} {third})"
        result, second = pair(a[0])
        if second:
            self.put(second, negated, "pred", g)
        self.put(result, text, "pred", g)

    def op_cvt(self, op, a, g, where):
        to, frm = op[-2], op[-1]
        if to in ("bf16x2", "f16x2"):
            if frm != "f32" or "rn" not in op:
                raise Stop("cvt")
            one = "to_bf16" if to == "bf16x2" else "to_f16"
            high, low = (f"{one}({self.full(o, 'f32')})" for o in a[1:3])
            self.put(a[0], f"pack16({high}, {low})", "b32", g)
            return
        x = self.full(a[1], frm)
        how = next((word for word in op if word in ROUND), None)
        if (to, frm) in ROUNDED:
            name, ty = ROUNDED[to, frm]
            self.put(a[0], f"{name}({x})", ty, g)
        elif to[0] == "f" and frm[0] == "f" and (WIDTH[to] >= WIDTH[frm] or to == "f32"):
            x = f"np.{ROUND[how]}({x})" if how else x
            self.put(a[0], f"({x}).astype({VIEW[to]})", to, g)
        elif to[0] in "su" and frm[0] == "f":
            self.put(a[0], f"f2i({x}, {VIEW[to]}, {how!r})", to, g)
        elif to[0] in "fsu" and frm[0] in "su":
            self.put(a[0], f"({x}).astype({VIEW[to]})", to, g)
        else:
            raise Stop("cvt")


ROUNDED = {("bf16", "f32"): ("to_bf16", "b16"), ("f32", "bf16"): ("bf16", "f32"),
           ("f16", "f32"): ("to_f16", "b16")}  # fmt: skip


def compared(cmp: str, x: str, y: str, ty: str) -> str:
    """Return the expression of a comparison.

    A comparison of floats with NaN is false, except for operators whose name ends in u.
    """
    if ty == "bf16":
        raise Stop("setp.bf16")
    if ty not in ("f32", "f64", "f16"):
        return f"({x} {COMPARE[cmp]} {y})"
    nan = f"(np.isnan({x}) | np.isnan({y}))"
    if cmp in ("num", "nan"):
        return nan if cmp == "nan" else f"~{nan}"
    if cmp == "ne":
        return f"(({x} != {y}) & ~{nan})"
    return (
        f"({x} {COMPARE[cmp]} {y})"
        if cmp in COMPARE
        else f"(({x} {COMPARE[cmp[:-1]]} {y}) | {nan})"
    )
