"""Write the table of `tools/gpu_trial.py`: goals of docs/lab/performance.md beside measurements."""

from __future__ import annotations

from benchmarks.attention_report import FLASH, compared
from benchmarks.attention_tiles import WORTH
from benchmarks.train_step import GOALS as STEP_GOALS

Row = tuple[str, str, str, bool | None]
"""What is compared, the goal, what was measured, and whether that meets the goal."""
MATMUL_SHARE = 0.5
REHEARSAL = "Triton's interpreter"
"""The beginning of the name of a machine that has no GPU."""


def page(names: list[str], results: dict[str, dict], machine: str) -> str:
    """Return the page of results as Markdown.

    Args:
        names: The names of all measurements, in their order.
        results: Maps the name of a measurement to its results.
        machine: The GPU and the versions. Results from another machine are left out.
    """
    verdicts = {True: "yes", False: "no", None: "-"}
    lines = [f"# A first trial on {machine}", ""]
    if machine.startswith(REHEARSAL):
        lines += ["This is a rehearsal on a CPU: only its rows of correctness have a meaning.", ""]
    lines += ["| what | goal | measured | met |", "|---|---|---|---|"]
    for name in names:
        found = results.get(name, {})
        found = found if found.get("on") == machine else {}
        for *cells, met in rows(name, found):
            lines.append(f"| {' | '.join(cells)} | {verdicts[met]} |")
    return "\n".join(lines) + "\n"


def rows(name: str, found: dict) -> list[Row]:
    """Return the rows of one measurement; `found` is empty if it has not been taken."""
    if not found or "begun" in found or "why" in found:
        return [(name, "-", found.get("why", "not measured"), None)]
    (kind,) = (kind for start, kind in KINDS.items() if name.startswith(start))
    try:
        return kind(name, found)
    except (ArithmeticError, LookupError) as error:  # the other rows are still shown
        return [(name, "-", f"cannot be shown: {error!r}", None)]


def correctness(name: str, found: dict) -> list[Row]:
    errors, limit = found["errors"], found["allowed"]
    worst = max(errors, key=lambda key: errors[key])
    met = all(error <= limit for error in errors.values())  # NaN does not
    value = f"{errors[worst]:.1e} ({worst})"
    return [
        (f"{name}: largest error / largest true value", f"<= {limit:.1e}", value, met),
        (f"{name}: same bits by cached launches", "yes", str(found["repeats"]), found["repeats"]),
    ]


def attention(name: str, found: dict) -> list[Row]:
    measured = [g for g in compared(found) if g["value"] is not None or g["why"]]
    entries = [
        (f"{name}: {g['what']}", g["goal"], g["why"] or f"{g['value']:.3g}", g["met"])
        for g in measured
        if g["T"] or FLASH in name
    ]
    why = "; ".join(dict.fromkeys(each["why"] for each in found["skipped"]))
    return entries or [(name, "-", why, None)]


def step(name: str, found: dict) -> list[Row]:
    (mine, other, least) = next(g for g in STEP_GOALS["cuda"] if name == f"step, {g[0]} / {g[1]}")
    ratio = found[mine]["tokens_per_second"] / found[other]["tokens_per_second"]
    share = found[mine]["share_of_matmul"]
    rate = f"{ratio:.2f} ({found[mine]['tokens_per_second']:,.0f} tokens/s)"
    what, goal = f"{name}: share of the matmul rate of the former", f">= {MATMUL_SHARE:.0%}"
    return [
        (f"{name}: tokens per second", f">= {least}", rate, ratio >= least),
        (what, goal, f"{share:.0%}", share >= MATMUL_SHARE),
    ]


def launches(name: str, found: dict) -> list[Row]:
    entries = []
    for row in found["rows"]:
        goal, cached, other = (row[f"{key}, us"] for key in ("goal", "cached", "Triton's launch"))
        what = f"{name}: host time, {row['call']}, {row['passes']}, us"
        met = float(cached) <= float(goal.removeprefix("<= "))
        entries.append((what, goal, f"{cached} cached, {other} by Triton", met))
    return entries


def tile(name: str, found: dict) -> list[Row]:
    share, what = found["share"], f"{name}: best found / committed, time"
    if share is None:
        return [(what, f">= {WORTH}", found["tried"][0]["why"], None)]
    ended = "" if found["complete"] else ", the search did not end"
    value = f"{share:.3f} with {'x'.join(map(str, found['tile']))}{ended}"
    met = False if share < WORTH else found["complete"] or None
    return [(what, f">= {WORTH}", value, met)]


KINDS = {
    "correctness": correctness,
    "attention": attention,
    "step": step,
    "launches": launches,
    "decoding": lambda name, x: [(f"{name}, us", "<= 20", f"{x['us']:.1f}", x["us"] <= 20)],
    "tile": tile,
}
"""Maps the beginning of a measurement's name to the function that writes its rows."""
