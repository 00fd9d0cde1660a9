"""Search for faster tile sizes on this GPU: the command `attention.py --tiles`.

A tile is (M query rows, N keys, warps, stages). The search for each pass (each Triton kernel)
starts from the committed tile in kernels/tile_sizes.py. All neighbours, which differ in one of the
four numbers by one step, are compiled in parallel and timed. The search moves to the fastest
neighbour until none is at least 1% faster. It compiles one or two dozen tiles per pass, whereas a
grid search would compile hundreds.

The score of a tile is the median time of the GPU (`attention_clock`) divided by that of the
committed tile, as a mean over two sequence lengths. The passes of the backward are timed together.
A tile is accepted only if its results equal those of the committed tiles up to rounding.

Rows of the table that are not "heavy" are found with kerple_log, heavy rows with
kerple_power_add_mul, and the tile of the pass `table` with rpe. attention_tiles.md is rewritten
after every pass. Before you commit a row, run `python tools/compile_kernels.py --changed`, which
refuses tiles that spill registers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from benchmarks.attention_clock import Clock, broken, reason, tidy
from benchmarks.attention_gpu import DTYPES, device_of
from benchmarks.attention_variants import make_inputs
from megatron.attention.fused import functions_of, tabulate
from megatron.kernels import launch
from megatron.kernels.compiled_variants import Variant
from megatron.kernels.tile_sizes import Tile, TileSizes, family, padded
from megatron.positional import load

PASSES = ("forward", "query", "key")
KERNELS = {False: "kerple_log", True: "kerple_power_add_mul"}
LENGTHS = (512, 4096)
WORTH = 0.99
LARGEST = 128 * 128
"""The largest M * N to try. For larger tiles the compiler takes minutes to report a failure."""
LIMITS = {"M": (16, 256), "N": (16, 256), "warps": (4, 8), "stages": (1, 5)}


class Problem:
    """The inputs for timing the passes of one distance kernel at one size."""

    def __init__(
        self, name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, clock: Clock
    ):
        self.clock = clock
        inputs = make_inputs(shape, dtype, clock.device)
        self.q, self.k, self.v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
        self.grad, scale = inputs.grad, shape[-1] ** -0.5
        pos = load(name)
        functions = functions_of(pos)[0]
        generator = torch.Generator().manual_seed(1)
        self.rows = (pos.initial_theta(shape[1], generator) + 0.05).to(clock.device)
        if functions.tabulated:
            self.rows = tabulate(pos, self.rows, shape[2], scale)
        self.setting = launch.Setting(functions, scale)
        self.committed = self.setting.tiles(self.q)

    def forward(self, tiles: TileSizes) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and `lse` and `lost` for the backward pass."""
        setting = replace(self.setting, tile_sizes=tiles)
        return launch.forward(self.q, self.k, self.v, self.rows, None, setting)

    def backward(
        self, tiles: TileSizes, kept: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor | None, ...]:
        setting = replace(self.setting, tile_sizes=tiles)
        inputs = (self.grad, self.q, self.k, self.v, *kept, self.rows)
        return launch.backward(*inputs, None, setting, True)[:4]

    def call(self, which: str) -> Callable[[TileSizes], tuple[Tensor, ...]]:
        """Return a function that takes tile sizes and runs the pass `which`."""
        if which == "forward":
            return lambda tiles: self.forward(tiles)[:2]  # `lost` is empty in fp32
        return partial(self.backward, kept=self.exact())

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.forward(self.committed)

    def compile(self, which: str, tiles: TileSizes) -> None:
        """Compile the pass for these tile sizes, in the background within `AsyncCompileMode`."""

        def warm_up(variant: Variant, programs: tuple[int, int], *given: Sequence[Any]) -> None:
            arguments = (*chain(*given), *variant.constants)
            variant.function.warmup(*arguments, grid=programs, **variant.options)

        call = self.call(which)
        with mock.patch.object(Variant, "start", warm_up):
            call(tiles)

    def ms(self, which: str, tiles: TileSizes) -> float:
        """Return the median time of the pass with these tile sizes, in milliseconds.

        Raises:
            ArithmeticError: A result differs from that of the committed tiles.
        """
        function = self.call(which)
        for got, expected in zip(function(tiles), function(self.committed), strict=True):
            error = (got.double() - expected.double()).abs().max()
            limit = 8 * torch.finfo(self.q.dtype).eps * max(1.0, expected.abs().max().item())
            if not error <= limit:
                raise ArithmeticError(f"wrong: off by {error:.1e}, where {limit:.1e} is rounding")
        host = self.clock.host_ms(lambda: function(tiles))
        times = sorted(self.clock.device_ms(lambda: function(tiles), host) for _ in range(9))
        return times[4]


def neighbours(tile: Tile, square: bool) -> Iterator[Tile]:
    """Yield the tiles that differ from `tile` in one number, by one step.

    Args:
        square: Whether M and N must stay equal.
    """
    for field, (low, high) in LIMITS.items():
        now = getattr(tile, field)
        steps = (now - 1, now + 1) if field == "stages" else (now // 2, now * 2)
        for value in steps:
            if not low <= value <= high or (square and field == "N"):
                continue
            changed = {"M": value, "N": value} if square and field == "M" else {field: value}
            if (other := replace(tile, **changed)).M * other.N <= LARGEST:
                yield other


class Search:
    """The search for one row of the table, with a log of all tiles tried."""

    def __init__(self, problems: list[Problem], tiles: TileSizes, deadline: float):
        self.problems, self.tiles, self.deadline = problems, tiles, deadline
        self.log: list[dict] = []
        self.complete = True

    def score(self, which: str, tile: Tile, base: list[float] | None) -> list[float] | None:
        """Return the milliseconds of each problem with `tile`, or None if the tile does not work.

        Args:
            base: The milliseconds with the committed tile, for the log.
        """
        row = {"pass": which, "tile": astuple(tile)}
        try:
            times = [p.ms(which, replace(self.tiles, **{which: tile})) for p in self.problems]
        except Exception as error:  # too much shared memory, too many registers, ...
            if broken(error):
                raise
            self.log.append(row | {"why": reason(error)})
            return None
        self.log.append(row | {"ms": times, "share": share(times, base or times)})
        return times

    def compile(self, which: str, tiles: list[Tile]) -> None:
        """Compile the pass for all tiles in parallel. Errors appear later, when a tile is timed."""
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for tile in tiles:
                for problem in self.problems:
                    problem.compile(which, replace(self.tiles, **{which: tile}))

    def improve(self, which: str) -> None:
        """Search for the best tile of one pass, and store it in `tiles`."""
        best = getattr(self.tiles, which)
        base = self.score(which, best, None)
        if base is None:
            return
        seen, best_share = {best}, 1.0
        while True:
            found = best
            new = [tile for tile in neighbours(best, which == "table") if tile not in seen]
            self.compile(which, new)
            for tile in new:
                if time.monotonic() > self.deadline:
                    self.complete = False
                    break
                seen.add(tile)
                times = self.score(which, tile, base)
                if times and share(times, base) < best_share * WORTH:
                    found, best_share = tile, share(times, base)
            if found == best or not self.complete:
                best = found
                break
            best = found
        self.tiles = replace(self.tiles, **{which: best})
        print(f"  {which}: {best}, {best_share:.3f} of the committed tile's time", flush=True)


def share(times: list[float], base: list[float]) -> float:
    return sum(x / y for x, y in zip(times, base, strict=True)) / len(times)


def row_text(key: tuple[int, int, bool], tiles: TileSizes) -> str:
    """Return a row of `TABLE` as source code for tile_sizes.py."""
    return f"        {key}: sizes({', '.join(str(tile) for tile in astuple(tiles))}),"


def run(args: argparse.Namespace) -> None:
    """Search for the tiles of one row of the table after another, until the time is up."""
    interpreted, device = args.device == "interpreter", device_of(args)
    clock, dtype = Clock(device), DTYPES[args.dtype]
    capability = torch.cuda.get_device_capability(device) if not interpreted else (9, 0)
    name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name(device)
    lengths = LENGTHS if len(args.lengths) > 2 else args.lengths
    deadline = time.monotonic() + 60 * args.minutes
    title = f"{name} (TABLE[{family(capability)}]), {args.dtype}, {args.heads} heads, torch "
    title += f"{torch.__version__}, triton {triton.__version__}"
    found: dict[tuple[int, int, bool], Search] = {}
    write(found, title, args.out)
    for size in args.head_sizes:
        for heavy, kernel in KERNELS.items():
            if time.monotonic() > deadline:
                break
            key = (dtype.itemsize, padded(size), heavy)
            print(f"{key}, by {kernel}, {deadline - time.monotonic():.0f} s left", flush=True)
            shapes = [(max(1, args.tokens // t), args.heads, t, size) for t in lengths]
            problems = [Problem(kernel, shape, dtype, clock) for shape in shapes]
            search = found[key] = Search(problems, problems[0].committed, deadline)
            for which in (*PASSES, "table") if heavy else PASSES:
                if which == "table":
                    search.problems = [Problem("rpe", shape, dtype, clock) for shape in shapes]
                search.improve(which)
                write(found, title, args.out)
            search.problems = problems = []
            tidy(device)
    print((args.out / "attention_tiles.md").read_text())
    print("Now: python tools/compile_kernels.py --changed, which refuses spills.")


def write(found: dict[tuple[int, int, bool], Search], title: str, folder: Path) -> None:
    """Write attention_tiles.json (every tile tried) and attention_tiles.md (the rows found)."""
    texts, log = [], []
    for key, search in found.items():
        texts.append(row_text(key, search.tiles))
        if not search.complete:
            texts[-1] += "  # the time was up before the search ended"
        log += [{"row": key, **each} for each in search.log]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attention_tiles.json").write_text(json.dumps(log, indent=1) + "\n")
    page = [f"# Tiles for {title}", "", "```python", *texts, "```", ""]
    (folder / "attention_tiles.md").write_text("\n".join(page))
