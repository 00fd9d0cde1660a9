"""Train models in many parallel layouts (cells), and compare each with one process.

    python tests/distributed/matrix.py --log FILE          every layout of at most 8 processes, the
                                                           models taking turns
    python tests/distributed/matrix.py --all --log FILE    every layout with every model
    python tests/distributed/matrix.py --ranks 4 --log FILE

A line is written as soon as its cell is done. A second start skips the cells that have a line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.helpers.jobs import cell, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks

Note = Callable[[Path, "Cell"], None]
STEPS = 10
AT_ONCE = 6
"""The number of cells that one set of processes trains. Each cell makes new process groups, whose
gloo threads never end and wake up often. After 30 cells they would take most processor time."""
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Cell:
    """One parallel layout of one model."""

    tp: int
    pp: int
    dp: int
    zero: int
    dtype: str
    pos: str
    tied: bool
    sp: bool = False
    cp: int = 1
    layers: int = 2

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def refused(self) -> bool:
        """Whether the config refuses this layout, or another cell has the same one."""
        pipeline = self.pp > 1 and (self.zero != 1 or self.cp > 1)
        return pipeline or (self.sp and self.tp == 1) or self.tp * self.cp > HEADS

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        sequence = f"{'sp' if self.sp else ''}-cp{self.cp}"
        layout = f"tp{self.tp}{sequence}-pp{self.pp}-dp{self.dp}-z{self.zero}"
        return f"{layout}-{self.dtype}-{self.pos}-{tied}-{self.layers}"

    @property
    def truth(self) -> Cell:
        """The cell of the same model in one process, which is the reference."""
        return Cell(1, 1, 1, 1, self.dtype, self.pos, self.tied, layers=self.layers)


AXES = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "pos": ("kerple_log", "kerple_power", "rotary", "rpe", "cross", "layers"),
    "tied": (True, False),
    "sp": (False, True),
    "cp": (1, 2),
}
HEADS = 4
LLAMA = {
    "pos_emb": "rotary",
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "use_qk_layernorm": True,
    "norm": "rmsnorm",
    "rmsnorm_fusion": True,
    "activation": "swiglu",
    "intermediate_size": 120,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
"""The keys of the model that a cell's `pos` calls `llama`. The script has no such cells."""
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
MODELS = {
    "grouped": {
        "pos_emb": "kerple_log + forget_gate",
        "num_attention_heads": 8,
        "num_kv_heads": 2,
    },
    "cross": DOCUMENTS
    | {"pos_emb": "rotary + kerple_log + forget_gate", "sliding_window_width": 9},
    "layers": DOCUMENTS
    | {
        "pos_emb": [[["kerple_log", "none"], "all"]],
        "sliding_window_width": [[[3, "none"], "all"]],
    },
}
"""The config keys of values of `pos` that are no embedding's name. The script has no `grouped`."""


def all_cells(ranks: int, largest: int = 8) -> list[Cell]:
    """Return every cell that is not refused, of at most `ranks` processes."""
    sizes = {axis: [v for v in AXES[axis] if v <= largest] for axis in ("tp", "pp", "dp")}
    products = itertools.product(*(AXES | sizes).values())
    cells = (Cell(*values, layers=max(2, values[1])) for values in products)
    return [c for c in cells if c.ranks <= ranks and not c.refused]


def alternating(cells: Iterable[Cell]) -> list[Cell]:
    """Return half of the cells of up to four processes, and a quarter of the larger ones.

    They are chosen like the black fields of a chessboard. For every layout, fp32 and bf16, and tied
    and untied embeddings remain. Positional embeddings take turns.
    """

    def colour(cell: Cell) -> int:
        return sum(values.index(getattr(cell, axis)) for axis, values in AXES.items())

    return [cell for cell in cells if colour(cell) % (2 if cell.ranks <= 4 else 4) == 0]


def layout(cell: Cell) -> tuple:
    """Return how the cell divides its processes, and its dtype."""
    return cell.tp, cell.pp, cell.dp, cell.cp, cell.dtype


def pairs(cell: Cell) -> set[tuple]:
    """Return every pair of settings of the cell."""
    return set(itertools.combinations([(axis, getattr(cell, axis)) for axis in AXES], 2))


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Choose, greedily, a few of `cells` with every layout and every pair of settings in `cells`.

    Of those that add as many, it chooses the one with the fewest processes.
    """
    adds = {cell: pairs(cell) | {layout(cell)} for cell in cells}
    left = set().union(*adds.values())
    chosen: list[Cell] = []
    while left:
        best = max(cells, key=lambda c: (len(adds[c] & left), -c.ranks))
        chosen.append(best)
        left -= adds[best]
    return chosen


def keys(cell_: Cell) -> dict:
    """Return the cell's config keys: two accumulated micro-batches, 16 samples per step."""
    return {
        "model_parallel_size": cell_.tp,
        "pipe_parallel_size": cell_.pp,
        "sequence_parallel": cell_.sp,
        "context_parallel_size": cell_.cp,
        **MODELS.get(cell_.pos, {"pos_emb": cell_.pos}),
        "no_weight_tying": not cell_.tied,
        "num_layers": cell_.layers,
        # At 0.01 the tenth gradient of some of these models jumps, and rounding decides how far.
        "optimizer": {"type": "Adam", "params": {"lr": 0.005}},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "train_iters": STEPS,
        "eval_interval": STEPS,
        "seq_length_val": 24,
        "eval_iters": 1,
        **cell(cell_.zero, cell_.dtype),
        **(LLAMA if cell_.pos == "llama" else {}),
    }


def train_cells(
    groups, folder: Path, prefix: str, cells: Iterable[Cell], note: Note | None = None
) -> None:
    """Train each cell with these processes into `folder`/name; rank 0 calls `note` after each."""
    for each in cells:
        config = folder / f"{each.name}.yml"
        if groups.is_main:
            write_config(config, prefix, save=str(folder / each.name), **keys(each))
            (folder / "current").write_text(each.name)
        groups.barrier()
        with contextlib.redirect_stdout(io.StringIO()):
            run_job(groups, config)
        if groups.is_main and note:
            note(folder, each)


def train_all(
    folder: Path, prefix: str, cells: Iterable[Cell], note: Note | None = None, timeout: float = 560
) -> None:
    """Train all cells, those with the fewest processes first, several with the same processes."""
    ordered = sorted(set(cells), key=lambda c: (c.ranks, c.name))
    for ranks, group in itertools.groupby(ordered, key=lambda c: c.ranks):
        group = list(group)
        for some in (group[i : i + AT_ONCE] for i in range(0, len(group), AT_ONCE)):
            run_ranks(ranks, train_cells, folder, prefix, some, note, timeout=timeout)


def metrics(run: Path) -> dict[tuple[str, int], float]:
    """Return (metric, step) -> value, for all metrics that must not depend on the layout."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        found |= {
            (f"{name}/{i}", step): value
            for name, values in row.items()
            if name.startswith(("train/loss", "train/grad_norm", "theta/", "validation/", "final/"))
            for i, value in enumerate(np.ravel(values))
        }
    return found


def distance(folder: Path, each: Cell) -> float:
    """Return the largest difference of a metric from one process, relative to max(1, |value|)."""
    truth, ours = metrics(folder / each.truth.name), metrics(folder / each.name)
    assert ours.keys() == truth.keys() and len(ours) > 2 * STEPS, each.name
    return max(abs(ours[k] - v) / max(1.0, abs(v)) for k, v in truth.items())


def write_line(folder: Path, each: Cell) -> None:
    """Append the result of a cell to the log, and remove its files."""
    found, allowed = distance(folder, each), TOLERANCE[each.dtype]
    verdict = "ok" if found <= allowed else "FAILED"
    with (folder / "log").open("a") as log:
        log.write(f"{each.name:<58} {found:.2e} (at most {allowed:.0e}) {verdict}\n")
    shutil.rmtree(folder / each.name)


def main() -> int:
    """Return exit code 1 if a cell differs by more than its tolerance or could not be trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="largest number of processes")
    parser.add_argument("--all", action="store_true", help="every layout with every model")
    parser.add_argument("--log", type=Path, required=True, help="continued if it exists")
    args = parser.parse_args()
    cells = [each for each in all_cells(args.ranks) if each != each.truth]
    cells = cells if args.all else alternating(cells)
    args.log.touch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "log").symlink_to(args.log.resolve())
        prefix = write_shards(folder)
        start = time.monotonic()
        left = missing(cells, args.log)
        train_all(folder, prefix, {each.truth for each in left})
        while left:
            try:
                train_all(folder, prefix, left, write_line, timeout=60 * AT_ONCE)
            except (RuntimeError, queue.Empty) as error:  # this cell failed, the others need not
                why = (str(error) or "no answer").strip().splitlines()[-1]
                with args.log.open("a") as log:
                    log.write(f"{(folder / 'current').read_text():<58} {why} FAILED\n")
            before, left = left, missing(cells, args.log)
            assert len(left) < len(before), f"{left[0].name} got no line"
        minutes = (time.monotonic() - start) / 60
    failed = sum(line.endswith("FAILED") for line in args.log.read_text().splitlines())
    summary = (
        f"{len(cells)} cells of at most {args.ranks} processes, {failed} failed; "
        f"{minutes:.0f} minutes for the last part, torch {torch.__version__}, "
        f"{os.cpu_count()} cores"
    )
    print(summary)
    with args.log.open("a") as log:
        log.write(f"# {summary}\n")
    return int(failed > 0)


def missing(cells: Iterable[Cell], log: Path) -> list[Cell]:
    """Return the cells without a line in the log."""
    done = {line.split()[0] for line in log.read_text().splitlines() if line.strip()}
    return [each for each in cells if each.name not in done]


if __name__ == "__main__":
    sys.exit(main())
