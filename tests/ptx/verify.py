"""Execute the fused attention kernels in the PTX emulator, and compare the results with float64.

    python tests/ptx/verify.py [--project DIR] [--target 80] [--only REGEX] [--case k=v,...]

The tool prints one line for each case, with two numbers for each result (out, dq, ...). The first
is the largest error divided by the largest true value. The second is the part of it that 16-bit
rounding explains, which is the error of the float64 formulas with values rounded where 16-bit
matrix products round them. The last line of the output is the number of wrong cases.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from tests.ptx import oracle, project
from tests.ptx.emulator import driver

KERNELS = ("kerple_log", "kerple_log3", "kerple_power", "kerple_power_mul", "kerple_power_add_mul",
           "alibi", "rpe", "none")  # fmt: skip
LEAST_SIZE = 1e-3
"""Least divisor of an error. With one key, the gradients of q, k and theta are exactly zero."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        kind: The name of the positional embedding.
        E: The head size.
        B, H, K: The numbers of sequences, query heads and key heads. K = 0 means K = H.
        T, S: The numbers of queries and keys. S = 0 means S = T. The queries have the last T
            positions.
        p: The dropout probability.
        layout: The layout of q, k and v in memory: bthe, bhte, or packed (all three are slices of
            one projection's output).
        theta: The values of theta's columns, the same for every head, separated by slashes. If it
            is empty, theta has its initial values.
        scale: The factor of the query-key products. 0 means 1/sqrt(E).
        cached: 1 means that cached launches must give the same bits.
        fill: Replaces `launch.FILL`. 0 keeps it, so that each query head has its own programs.
    """

    kind: str = "kerple_log"
    dtype: str = "bf16"
    E: int = 64
    B: int = 1
    H: int = 2
    K: int = 0
    T: int = 64
    S: int = 0
    p: float = 0.0
    layout: str = "bthe"
    theta: str = ""
    seed: int = 0
    scale: float = 0.0
    cached: int = 0
    fill: int = 0

    @classmethod
    def read(cls, text: str) -> Case:
        """Parse a case from a text such as `kind=rpe,T=100`."""
        kinds = {name: type(value) for name, value in asdict(cls()).items()}
        pairs = dict(x.split("=") for x in text.split(",") if x)
        return cls(**{name: kinds[name](value) for name, value in pairs.items()})

    @property
    def key_heads(self) -> int:
        return self.K or self.H

    @property
    def keys(self) -> int:
        return self.S or self.T

    def __str__(self) -> str:
        text = f"{self.kind} {self.dtype} E{self.E} B{self.B} H{self.H}/{self.key_heads}"
        text += f" T{self.T} S{self.keys}" + (f" p{self.p}" if self.p else "")
        text += f" {self.layout}" if self.layout != "bthe" else ""
        text += f" theta={self.theta}" if self.theta else ""
        text += f" scale={self.scale}" if self.scale else ""
        text += f" fill{self.fill}" * (self.fill > 0) + f" seed{self.seed}" * (self.seed > 0)
        return text + " cached" * self.cached


def standard() -> Iterator[Case]:
    """Yield the default cases, which cover all distance kernels, dtypes, sizes and layouts."""
    for kind in KERNELS:
        for dtype in DTYPES:
            yield Case(kind, dtype, T=200)
    for kind in ("kerple_log", "kerple_power_add_mul", "none", "rpe"):
        for E in (80, 128):
            for dtype in ("bf16", "fp32"):
                yield Case(kind, dtype, E, H=1, T=200)
    for kind in ("kerple_log", "kerple_power_add_mul", "rpe"):
        case = Case(kind)
        yield replace(case, H=4, K=2, T=100)
        yield replace(case, K=1, T=100, S=230)
        yield replace(case, dtype="fp16", B=2, T=1, S=77)
        yield replace(case, T=200, p=0.2)
        yield replace(case, dtype="fp32", E=80, K=1, T=100, S=150, p=0.1)
        yield replace(case, T=1)
        yield replace(case, H=1)
        yield replace(case, H=1, T=600)
        yield replace(case, T=100, layout="bhte")
        yield replace(case, T=100, layout="packed")
    for E in (16, 32, 40, 96, 256):
        yield Case(E=E, H=1, T=150)
    yield Case(dtype="fp32", E=256, H=1, T=100)
    yield Case(E=36, H=1, T=100)  # rows that are no multiple of 16 bytes
    yield Case(E=65, H=1, T=100)


@dataclass
class Run:
    """The inputs of a case and the results of the emulated kernels, converted to float64."""

    inputs: list[np.ndarray]
    theta: np.ndarray | None
    scale: float
    keep: np.ndarray | None
    got: dict[str, np.ndarray]


def run(case: Case) -> Run:
    """Run the forward and the backward pass of a case in the emulator."""
    from megatron.attention.call import Call
    from megatron.attention.fused import fused
    from megatron.kernels import launch
    from megatron.positional import load

    dtype, rng = DTYPES[case.dtype], torch.Generator().manual_seed(case.seed + 1)
    heads, scale, pos = case.H, case.scale or case.E**-0.5, load(case.kind)
    offset = case.keys - case.T

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def tensor(heads: int, length: int) -> torch.Tensor:
        x = draw(case.B, heads, length, case.E)
        if case.layout == "bthe":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.requires_grad_()

    given = [tensor(heads, case.T), *(tensor(case.key_heads, case.keys) for _ in "kv")]
    leaves = given
    if case.layout == "packed":  # one projection's output, as in a model
        leaves = [draw(case.B, case.T, heads, 3 * case.E).requires_grad_()]
        given = [x.transpose(1, 2) for x in leaves[0].split(case.E, dim=-1)]
    do = draw(case.B, heads, case.T, case.E)
    theta = pos.initial_theta(heads, rng) if pos.parameters else None
    if case.theta:
        columns = [float(x) for x in case.theta.split("/")]
        theta = torch.tensor(columns).expand(heads, -1).contiguous()
    learns = theta is not None and pos.learnable
    if learns:
        theta.requires_grad_()
    torch.manual_seed(case.seed)
    driver.LOG.clear()
    with mock.patch.object(launch, "FILL", case.fill or launch.FILL):
        out = fused(Call(*given, pos, theta, scale=scale, dropout_p=case.p, query_offset=offset))
        out.backward(do)
    gradients = [x.grad for x in leaves]
    if case.layout == "packed":
        gradients = [x.transpose(1, 2) for x in gradients[0].split(case.E, dim=-1)]
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    if learns:
        got["dtheta"] = theta.grad
    keep = None
    if case.p:
        torch.manual_seed(case.seed)
        seed = int(torch.randint(1 << 62, (1,)))
        keep = oracle.mask(seed, case.B, heads, case.T, case.keys, case.p)
    *inputs, theta = (None if x is None else numbers(x) for x in (*given, do, theta))
    return Run(inputs, theta, scale, keep, {name: numbers(x) for name, x in got.items()})


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def errors_of(case: Case, done: Run) -> dict[str, tuple[float, float | None]]:
    """Return name of a result -> (its error, the error that 16-bit rounding explains or None).

    Rounding to 16 bits does not explain an error of theta's gradient, which is computed in fp32.
    """
    offset = case.keys - case.T
    arguments = (case.kind, *done.inputs, done.theta, done.scale, offset, done.keep, case.p)
    true, near = oracle.attention(*arguments), None
    if case.dtype != "fp32":

        def half(x: np.ndarray) -> np.ndarray:
            wide = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32)
            return wide.to(DTYPES[case.dtype]).double().numpy()

        near = oracle.attention(*arguments, half=half)

    def error(name: str, x: np.ndarray, exact: np.ndarray) -> float:
        return float(np.abs(x - exact).max() / max(np.abs(true[name]).max(), LEAST_SIZE))

    errors = {}
    for name, x in done.got.items():
        fp32 = near is None or name == "dtheta"
        explained = None if fp32 else error(name, near[name], true[name])
        errors[name] = (error(name, x, true[name]), explained)
    return errors


def findings() -> list[str]:
    """Return the emulator's findings in the launches since the last `run` began."""
    return [f"{entry['name']}: {x}" for entry in driver.LOG for x in entry["findings"].lines()]


def judge(case: Case, errors: dict[str, tuple[float, float | None]]) -> str | None:
    """Return what is wrong with a case, or None.

    A case is wrong if a result is NaN, if an error is more than three times what rounding explains
    (and not tiny), or if the emulator has a finding.
    """
    least = 4e-3 if case.dtype == "bf16" else 1e-3
    for name, (error, explained) in errors.items():
        allowed = 3e-5 if case.dtype == "fp32" else 2e-4
        if explained is not None:
            allowed = max(3 * explained, least)
        if not error <= allowed:
            return f"{name}: {error:.2e} > {allowed:.2e}"
    return next((x for x in findings() if "note:" not in x), None)


def changed_by_caching(case: Case, plain: Run) -> str | None:
    """Return which results of cached launches are not those of `plain`, or None.

    The first of two runs puts the kernels into the cache, and the second finds them there.
    """
    from megatron.attention import cache_launches

    cache_launches(True)
    runs = [run(case), run(case)]
    cache_launches(False)
    names = [name for name, x in plain.got.items() if any((x != r.got[name]).any() for r in runs)]
    return f"cached launches change {', '.join(names)}" if names else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--only", default=".", help="regular expression of cases")
    parser.add_argument("--case", action="append", type=Case.read, help="k=v,k=v: see Case")
    parser.add_argument("--log", type=Path, help="file of JSON lines to append to")
    parser.add_argument("--no-races", action="store_true", help="do not look for races")
    args = parser.parse_args()
    project.use(args.project)
    driver.install(args.target)
    driver.OPTIONS["races"] = not args.no_races
    wrong = 0
    for case in args.case or standard():
        if not re.search(args.only, str(case)):
            continue
        start, errors = time.time(), {}
        try:
            done = run(case)
            errors = errors_of(case, done)
            verdict = judge(case, errors)
            if case.cached:
                verdict = verdict or changed_by_caching(case, done)
        except Exception as error:  # the emulator's and Triton's: the other cases still run
            verdict = f"{type(error).__name__}: {error}"
            if args.case:
                traceback.print_exc()
        shown = "  ".join(
            f"{name} {error:.1e}" + (f"/{explained:.1e}" if explained is not None else "")
            for name, (error, explained) in errors.items()
        )
        mark = "BAD" if verdict else "ok "
        print(f"{mark} sm_{args.target} {case}: {shown}  [{time.time() - start:.0f} s]", flush=True)
        for line in filter(None, (verdict, *findings())):
            print(f"    {line}")
        wrong += verdict is not None
        if args.log:
            row = {"target": args.target, "case": asdict(case), "verdict": verdict}
            row |= {"errors": errors, "findings": findings()}
            with args.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
