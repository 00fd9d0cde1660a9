"""Read and write the CSV table of compiled Triton kernels, and report problems of the kernels."""

from __future__ import annotations

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.files import replacing
from megatron.kernels.tile_sizes import SHARED_MEMORY, family

BLACKWELL = (100, 120)


@dataclass(frozen=True)
class Variant:
    """One Triton kernel to compile.

    Attributes:
        target: The GPU's compute capability, such as 90.
        kernel: The distance kernel, alone or with other terms: `kerple_log + forget_gate`.
        which: The pass, a key of `megatron.kernels.variants.PASSES`.
        dtype: `bf16`, `fp16` or `fp32`.
        head_size: The number of dimensions of each attention head.
        dropout: Whether the kernel applies dropout.
    """

    target: int
    kernel: str
    which: str
    dtype: str
    head_size: int
    dropout: bool = False

    @property
    def name(self) -> str:
        end = " dropout" if self.dropout else ""
        return f"sm_{self.target} {self.kernel} {self.which} {self.dtype} {self.head_size}{end}"


@dataclass(frozen=True)
class Row:
    """A line of the CSV: one compiled kernel and its resources.

    `tools/compile_kernels.py` explains the columns.
    """

    triton: str
    target: str
    kernel: str
    which: str
    dtype: str
    head_size: int
    dropout: int
    M: int
    N: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    serialised: int
    special_functions_per_score: float

    @property
    def variant(self) -> Variant:
        target, *named, dropout = astuple(self)[1:7]
        return Variant(int(target.removeprefix("sm_")), *named, dropout=bool(dropout))

    @property
    def wrong(self) -> str | None:
        """The reason why this compiled kernel should not be used on its GPU, or None."""
        target, where = self.variant.target, self.variant.name
        memory = SHARED_MEMORY[family(divmod(target, 10))]
        if self.shared > memory:
            return f"{where}: {self.shared} bytes of shared memory of {memory}"
        if self.serialised:
            return f"{where}: matrix products wait for each other"
        if target in BLACKWELL or self.dtype == "fp32" or self.head_size > 128 or not self.spilled:
            return None
        return f"{where}: a thread spills {self.spilled} bytes"


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    convert: list[Any] = [{"int": int, "float": float}.get(str(f.type), str) for f in fields(Row)]
    return [Row(*(to(x) for to, x in zip(convert, line, strict=True))) for line in lines]


def write(rows: list[Row], out: Path) -> None:
    with replacing(out) as path, path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["pass" if f.name == "which" else f.name for f in fields(Row)])
        writer.writerows(astuple(row) for row in rows)


def summary(rows: list[Row]) -> str:
    spill, serial = sum(row.spilled > 0 for row in rows), sum(row.serialised for row in rows)
    head = f"{len(rows)} variants: {spill} spill registers, {serial} have serialised products"
    return "\n".join([head, *(row.wrong for row in rows if row.wrong)])
