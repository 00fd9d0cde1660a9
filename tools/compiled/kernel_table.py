"""Read and write the CSV table of compiled Triton kernels, and report problems of these kernels."""

from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from megatron.files import write_text
from megatron.kernels.tile_sizes import SHARED_MEMORY, family


@dataclass(frozen=True)
class Variant:
    """One Triton kernel to compile.

    Attributes:
        target: The GPU's compute capability without the dot, such as 90.
        kernel: The distance kernel, alone or with other terms of attention, as in
            `kerple_log + forget_gate`.
        which: The name of the kernel's pass, which is a part of the forward or backward
            computation.
        dtype: The dtype of the inputs: `bf16`, `fp16` or `fp32`.
        head_size: The number of dimensions of each attention head.
        dropout: Whether the kernel applies dropout.
        group: The number of query heads that share a key head.
    """

    # `which` is a key of `megatron.kernels.compiled_variants.PASSES`.

    target: int
    kernel: str
    which: str
    dtype: str
    head_size: int
    dropout: bool = False
    group: int = 1

    @property
    def name(self) -> str:
        end = " dropout" * self.dropout + f" group {self.group}" * (self.group > 1)
        return f"sm_{self.target} {self.kernel} {self.which} {self.dtype} {self.head_size}{end}"


@dataclass(frozen=True, kw_only=True)
class Row(Variant):
    """A row of the CSV: one compiled kernel and its resources.

    `tools/compile_kernels.py` explains the columns.
    """

    triton: str
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
        return Variant(*(getattr(self, field.name) for field in fields(Variant)))

    @property
    def wrong(self) -> str | None:
        """The reason why this kernel should not be used on its GPU, or None if it may be used."""
        where, memory = self.name, SHARED_MEMORY[family(divmod(self.target, 10))]
        if self.shared > memory:
            return f"{where}: {self.shared} bytes of shared memory of {memory}"
        if self.serialised:
            return f"{where}: matrix products wait for each other"
        if self.dtype == "fp32" or self.head_size > 128 or not self.spilled:
            return None
        return f"{where}: a thread spills {self.spilled} bytes"


def read_rows(path: Path) -> list[Row]:
    table = pd.read_csv(path, float_precision="round_trip").rename(columns={"pass": "which"})
    table["target"] = table["target"].str.removeprefix("sm_").astype(int)
    table["dropout"] = table["dropout"].astype(bool)
    return [Row(**row) for row in table.to_dict("records")]


def write(rows: list[Row], out: Path) -> None:
    table = pd.DataFrame(rows).rename(columns={"which": "pass"}).astype({"dropout": int})
    table["target"] = "sm_" + table["target"].astype(str)
    table.insert(0, "triton", table.pop("triton"))
    write_text(out, table.to_csv(index=False, lineterminator="\n"))


def summary(rows: list[Row]) -> str:
    spill, serial = sum(row.spilled > 0 for row in rows), sum(row.serialised for row in rows)
    head = f"{len(rows)} variants: {spill} spill registers, {serial} have serialised products"
    return "\n".join([head, *(row.wrong for row in rows if row.wrong)])
