"""Layouts as cells: which there are, how a cell is trained, how far it is from one process.

    python tests/distributed/matrix.py --ranks 4 --log FILE     every cell of at most 4 processes
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from jobs import cell, run_job, write_config, write_shards  # noqa: E402
from launch import run_ranks  # noqa: E402

STEPS = 10
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Cell:
    """One layout of one model."""

    tp: int
    pp: int
    dp: int
    zero: int
    dtype: str
    pos: str
    tied: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-z{self.zero}-{self.dtype}-{self.pos}-{tied}"

    @property
    def truth(self) -> Cell:
        """The same model in one process."""
        return Cell(1, 1, 1, 1, self.dtype, self.pos, self.tied)


AXES = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "pos": ("kerple_log", "kerple_power", "rotary", "rpe"),
    "tied": (True, False),
}


def all_cells(ranks: int, largest: int = 8) -> list[Cell]:
    """Every cell that is not refused, of at most `ranks` processes and `largest` on an axis."""
    sizes = {axis: [v for v in AXES[axis] if v <= largest] for axis in ("tp", "pp", "dp")}
    cells = (Cell(*values) for values in itertools.product(*(AXES | sizes).values()))
    return [c for c in cells if c.ranks <= ranks and (c.pp == 1 or c.zero == 1)]


def pairs(cell: Cell) -> set[tuple]:
    """Every two of its settings."""
    named = list(zip((f.name for f in fields(cell)), astuple(cell), strict=True))
    return set(itertools.combinations(named, 2))


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """A few of `cells` among which every pair of settings occurs that occurs at all (greedy)."""
    left = set().union(*map(pairs, cells))
    chosen: list[Cell] = []
    while left:
        best = max(cells, key=lambda c: (len(pairs(c) & left), c.ranks))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def keys(cell_: Cell) -> dict:
    """Its config: clipping on (in `BASE`), two micro-batches accumulated, eight samples a step."""
    return {
        "model_parallel_size": cell_.tp,
        "pipe_parallel_size": cell_.pp,
        "pos_emb": cell_.pos,
        "no_weight_tying": not cell_.tied,
        "num_layers": 4,
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "train_iters": STEPS,
        "eval_interval": STEPS,
        "seq_length_val": 24,
        "eval_iters": 1,
        **cell(cell_.zero, cell_.dtype),
    }


def train_cells(groups, folder: Path, prefix: str, cells: Iterable[Cell]) -> None:
    """Train each cell of this world size into `folder`/name; checkpoints are not kept."""
    torch.set_num_threads(1)
    for each in cells:
        config = folder / f"{each.name}.yml"
        if groups.is_main:
            write_config(config, prefix, save=str(folder / each.name), **keys(each))
        groups.barrier()
        run_job(groups, config)


def train_all(folder: Path, prefix: str, cells: Sequence[Cell], timeout: float = 280) -> None:
    """Train all cells and their truths, one process group for each world size."""
    wanted = sorted({*cells, *(c.truth for c in cells)}, key=lambda c: (c.ranks, c.name))
    for ranks, group in itertools.groupby(wanted, key=lambda c: c.ranks):
        run_ranks(ranks, train_cells, folder, prefix, list(group), timeout=timeout)


def metrics(run: Path) -> dict[tuple[str, int], float]:
    """(metric, step) -> value, of everything that must not depend on the layout."""
    import json

    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        found |= {
            (name, step): value
            for name, value in row.items()
            if name.startswith(("train/loss", "train/grad_norm", "theta/", "validation/", "final/"))
        }
    return found


def distance(folder: Path, each: Cell) -> float:
    """Largest difference from one process, relative to max(1, |value|), over all metrics."""
    truth, ours = metrics(folder / each.truth.name), metrics(folder / each.name)
    assert ours.keys() == truth.keys() and len(ours) > 2 * STEPS, each.name
    return max(abs(ours[k] - v) / max(1.0, abs(v)) for k, v in truth.items())


def main() -> int:
    """Exit code 1 when a cell is out of tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="largest number of processes")
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    cells = all_cells(args.ranks)
    failed = 0
    with tempfile.TemporaryDirectory() as name, args.log.open("w") as log:
        folder = Path(name)
        prefix = write_shards(folder)
        start = time.monotonic()
        train_all(folder, prefix, cells, timeout=1e5)
        for each in sorted(cells, key=lambda c: (c.ranks, c.name)):
            found, allowed = distance(folder, each), TOLERANCE[each.dtype]
            verdict = "ok" if found <= allowed else "FAILED"
            failed += found > allowed
            log.write(f"{each.name:<50} {found:.2e} (at most {allowed:.0e}) {verdict}\n")
        minutes = (time.monotonic() - start) / 60
        log.write(
            f"{len(cells)} cells of at most {args.ranks} processes, {failed} out of tolerance, "
            f"{minutes:.0f} minutes, torch {torch.__version__}\n"
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
