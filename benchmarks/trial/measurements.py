"""List the measurements of `tools/gpu_trial.py`, in order of worth.

Each measurement is a function without arguments that returns its results as a dict for JSON. They
call the tests' cases and the benchmarks of docs/gpu.md. A rehearsal runs the same code on a CPU, in
Triton's interpreter, on tiny inputs. Its times have no meaning.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from benchmarks import attention, attention_gpu, attention_tiles
from benchmarks.attention_clock import Clock, tidy
from benchmarks.attention_report import FLASH, FLOORS, FUSED, GOALS
from benchmarks.train_step import GOALS as STEP_GOALS
from benchmarks.trial.goals import REHEARSAL
from megatron.attention import AttentionError, cache_launches, choose
from megatron.positional import load
from tests.helpers.terms import Case
from tests.kernels.cases import TOLERANCE

ROOT = Path(__file__).resolve().parents[2]
CASES: list[tuple[str, str, int, dict[str, int]]] = [
    ("kerple_log", "bf16", 64, {}),
    ("kerple_log", "bf16", 128, {}),
    ("kerple_log", "bf16", 64, {"group": 4}),
    ("kerple_log", "bf16", 128, {"group": 8}),
    ("kerple_log", "bf16", 64, {"group": 8, "queries": 1, "offset": 1023}),
    ("none", "bf16", 64, {}),
    ("rotary + kerple_log", "bf16", 128, {"group": 8}),
    ("alibi", "bf16", 64, {"group": 4}),
    ("kerple_power", "bf16", 64, {}),
    ("kerple_power", "bf16", 128, {"group": 4}),
    ("rpe", "bf16", 64, {}),
    ("kerple_log", "fp16", 64, {}),
    ("kerple_log", "fp32", 64, {}),
    ("kerple_log + documents + window", "bf16", 64, {"offset": 70}),
    ("kerple_log + sink + decay", "bf16", 64, {"group": 2}),
    ("kerple_log + kerple_power_mul + log_n + sink + decay + documents + window", "bf16", 64, {}),
    ("kerple_power_add_mul", "bf16", 128, {}),
    ("kerple_log", "bf16", 16, {}),
    ("kerple_log", "bf16", 80, {}),
    ("kerple_log", "bf16", 256, {}),
]
"""Variants of attention: the terms of a `tests.helpers.terms.Case`, dtype, head size, and other
arguments of `Trial.correct`."""
RIVALS = (FLASH, *FLOORS)
STEP = (
    "--layers 12 --width 768 --heads 12 --length 512 --batch 32 --vocab 50304 --precision bf16 "
    "--rounds 5"
)
TINY_STEP = "--layers 1 --width 16 --heads 1 --length 8 --batch 1 --vocab 32 --rounds 1 --steps 1"
TINY = "--dtype fp32 --heads 1 --head-sizes 8 --lengths 16 --tokens 16 --repeats 1"
SEARCH = 120
"""The seconds after which a search for a tile tries no further tile."""


class Trial:
    """What the measurements need to know: the device and the sizes.

    Args:
        rehearsal: Whether this is a CPU, with Triton's interpreter.
        folder: The folder for the files of the benchmarks.
    """

    def __init__(self, rehearsal: bool, folder: Path):
        self.rehearsal, self.folder = rehearsal, folder
        self.device = torch.device("cpu" if rehearsal else "cuda")
        if not rehearsal:  # the same text as an error of training, such as a Triton that is too old
            try:
                choose("fused", load("kerple_log"), device_type="cuda", dtype=torch.bfloat16)
            except AttentionError as error:
                sys.exit(f"error: nothing can be measured: {error}")
        name = REHEARSAL if rehearsal else torch.cuda.get_device_name()
        self.machine = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
        given = ["--device", "interpreter", *TINY.split()] if rehearsal else ["--device", "cuda"]
        self.args = attention.parser().parse_args([*given, "--out", str(folder)])
        self.dtype, self.clock = attention_gpu.DTYPES[self.args.dtype], Clock(self.device)

    def parts(self) -> list[dict[str, Callable[[], dict]]]:
        """Return for each part, from 1, the names and functions of its measurements."""
        tiles = {
            f"tile of the pass {which}, head size {size}, {kernel}": partial(
                self.tile, size, kernel, which
            )
            for size in (64, 128)
            for heavy, kernel in attention_tiles.KERNELS.items()
            for which in (*attention_tiles.PASSES, *["table"] * heavy)
        }
        return [
            {case_name(*each): partial(self.correct, *each[:3], **each[3]) for each in CASES},
            {
                f"attention, length {length}, {rival}": partial(self.attention, length, rival)
                for rival in RIVALS
                for length in GOALS
            },
            {f"step, {a} / {b}": partial(self.step, a, b) for a, b, _ in STEP_GOALS["cuda"]},
            {"launches": self.launches, "decoding, 16384 keys": self.decoding},
            tiles,
        ]

    def correct(
        self, terms: str, dtype: str, size: int, group: int = 1, queries: int = 333, offset: int = 0
    ) -> dict:
        """Compare fused attention with eager in float64, and with its bits by cached launches.

        The errors are relative to the largest true value, or to 1.

        Args:
            group: The number of query heads that share a key head.
            offset: The number of keys before the first query's key.
        """
        shape = (2, 4 * group, queries, offset)
        if self.rehearsal:
            dtype, size = dtype.replace("bf16", "fp32"), min(size, 16)
            group = min(group, 2)
            shape = (1, group, min(queries, 18), min(offset, 5))
        case = Case(terms.split(" + "), *shape, size=size, group=group)
        kind = attention_gpu.DTYPES[dtype]
        case.options["scale"] = size**-0.5
        if (starts_BS := case.options.get("starts_BS")) is not None:
            case.options["starts_BS"] = starts_BS.to(self.device)
        case.grad = case.grad.to(self.device, kind).double()
        single = (x.detach().to(self.device, torch.float32) for x in case.inputs)
        case.inputs = [x.requires_grad_() for x in single]
        inputs, runs = case.rounded(kind), []
        for cached in (False, True):
            cache_launches(cached)
            runs.append(case.run("fused", inputs))
        cache_launches(False)
        exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
        names = ("out", "dq", "dk", "dv", *["dtheta"] * bool(case.pos.parameters), "ddecay")
        errors = {
            name: ((x.double() - y).abs().max() / y.abs().max().clamp(min=1)).item()
            for name, x, y in zip(names, runs[0], exact, strict=False)
        }
        repeats = all(map(torch.equal, *runs))
        return {"errors": errors, "allowed": TOLERANCE[kind], "repeats": repeats}

    def attention(self, length: int, rival: str) -> dict:
        """Time fused attention and a rival in turns, with `attention_gpu.measure`."""
        attention_gpu.forget(self.device)
        length_here = 16 if self.rehearsal else length
        group = attention_gpu.Group(self.args.head_sizes[0], length_here, (FUSED, rival))
        found: dict[str, Any] = {"timings": [], "skipped": []}
        found["setting"] = {"dtype": self.args.dtype, "heads": self.args.heads}
        attention_gpu.measure(group, 0, self.args, self.dtype, self.clock, math.inf, found)
        for row in (*found["timings"], *found["skipped"]):
            row["T"] = length
        return found

    def step(self, *variants: str) -> dict:
        """Return tokens per second and the share of the matmul rate of each variant."""
        sizes = f"--device cpu {TINY_STEP}" if self.rehearsal else f"--device cuda {STEP}"
        out = self.folder / f"step {' over '.join(variants)}".replace(", ", "_").replace(" ", "_")
        self._run("benchmarks/train_step.py", *sizes.split(), "--only", *variants, out=out)
        rows = json.loads((out / "train_step.json").read_text())["rows"]
        keys = ("tokens_per_second", "share_of_matmul", "peak_mb")
        return {row["variant"]: {key: row[key] for key in keys} for row in rows}

    def launches(self) -> dict:
        """Return the rows of `launch_time`."""
        sizes = ["--device", "cpu", "--rounds", "2"] if self.rehearsal else ["--device", "cuda"]
        out = self.folder / "launch_time"
        self._run("benchmarks/host/launch_time.py", *sizes, out=out)
        with out.with_suffix(".csv").open(newline="") as file:
            return {"rows": list(csv.DictReader(file))}

    def decoding(self) -> dict:
        """Return the time of one query in 32 heads, which share 8 key heads of size 128."""
        heads, keys, size = (4, 1100, 16) if self.rehearsal else (32, 16_384, 128)
        case = Case(["kerple_log"], 1, heads, 1, keys - 1, size=size, group=4)
        inputs = [x.detach().to(self.device, self.dtype) for x in case.inputs]
        call = partial(case.out, "fused", inputs)
        repeats = range(1 if self.rehearsal else 9)
        return {"us": 1e3 * median(self.clock.device_ms(call, 1.0) for _ in repeats)}

    def tile(self, size: int, kernel: str, which: str) -> dict:
        """Return the best tile of a pass, and its share of the time with the committed tile."""
        kernel, lengths = "rpe" if which == "table" else kernel, attention_tiles.LENGTHS
        if self.rehearsal:
            size, lengths = 16, (16,)
        batches = {length: max(1, self.args.tokens // length) for length in lengths}
        shapes = [(batch, self.args.heads, length, size) for length, batch in batches.items()]
        clock, until = self.clock, 0 if self.rehearsal else time.monotonic() + SEARCH
        problems = [attention_tiles.Problem(kernel, s, self.dtype, clock) for s in shapes]
        search = attention_tiles.Search(problems, problems[0].committed, until)
        search.improve(which)
        best = astuple(getattr(search.tiles, which))
        share = next(
            (r["share"] for r in search.log if (r["tile"], "ms" in r) == (best, True)), None
        )
        tidy(self.device)
        return {"tile": best, "share": share, "complete": search.complete, "tried": search.log}

    def _run(self, script: str, *options: str, out: Path) -> None:
        """Run a benchmark as a process, with the memory of the GPU to itself.

        Raises:
            RuntimeError: It failed.
        """
        tidy(self.device)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *options, "--out", str(out)],
            env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError("; ".join(done.stderr.strip().splitlines()[-2:]))


def case_name(terms: str, dtype: str, size: int, more: dict[str, int]) -> str:
    """Return the name of the measurement of one of `CASES`."""
    parts = [f"{key} {value}" for key, value in more.items()]
    return ", ".join([f"correctness, {terms}", dtype, f"head size {size}", *parts])
