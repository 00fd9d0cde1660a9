"""Write the report of the GPU benchmark: tables, goals and a plot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from megatron import pictures

FUSED, FLASH = "fused kerple_log", "sdpa flash"
FLOORS = {"published": "against published", "flex table": "against flex table",
          "flex [H]": "against flex [H]"}  # fmt: skip

# T: largest fused / flash forward and both; smallest published, flex table, flex [H] / fused, both.
GOALS = {
    512: (1.15, 1.25, 4.0, 1.3, 10.0),
    2048: (1.05, 1.20, 8.0, 1.5, 20.0),
    8192: (1.00, 1.15, 12.0, 1.5, 20.0),
    16384: (1.00, 1.15, 12.0, 1.5, 20.0),
}
"""The goals by sequence length, for bf16, head size 64 and 16k tokens on one H200."""
MEGABYTE_MORE = 1.048576


def write(report: dict, folder: Path) -> None:
    """Write attention_gpu.json, attention_gpu.md and, with matplotlib, attention_gpu.png."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "attention_gpu.json.part"
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(folder / "attention_gpu.json")
    picture = plot(report, folder / "attention_gpu.png")
    (folder / "attention_gpu.md").write_text(markdown(report, picture))


def compared(report: dict) -> list[dict]:
    """Return one row for each goal, with the measured value (None if it was not measured)."""
    size = report["timings"][0]["E"] if report["timings"] else None
    found = []
    for length, limits in GOALS.items():
        rows = {r["variant"]: r for r in report["timings"] if (r["T"], r["E"]) == (length, size)}
        if FUSED not in rows:
            continue
        fused = rows[FUSED]
        for what, limit in zip(("forward", "forward_backward"), limits[:2], strict=True):
            value = ratio(fused, rows.get(FLASH), what)
            found.append(row(length, f"fused / flash, {words(what)}", limit, value, "<="))
        for (other, text), limit in zip(FLOORS.items(), limits[2:], strict=True):
            value = ratio(rows.get(other), fused, "forward_backward")
            entry = row(length, f"{text}, forward + backward", limit, value, ">=")
            reasons = [s["why"] for s in report["skipped"] if (s["T"], s["variant"]) ==
                       (length, other) and s["E"] == size and s["what"] != "accuracy"]  # fmt: skip
            entry["why"] = reasons[0] if reasons and value is None else ""
            if entry["why"] == "out of memory":
                entry["met"] = True
            found.append(entry)
        mine, plain = (rows.get(name, {}).get("peak_mb") for name in (FUSED, FLASH))
        if mine is not None and plain is not None:
            limit = MEGABYTE_MORE + lost_megabytes(report["setting"], rows[FUSED])
            found.append(row(length, "peak MB beyond flash", limit, mine - plain, "<="))
    repeated = [r["repeatable"] for r in report["timings"] if "repeatable" in r]
    if repeated:
        found.append(row(0, "gradients repeat bit for bit", 1.0, float(all(repeated)), ">="))
    return found


def lost_megabytes(setting: dict, timing: dict) -> float:
    """Return the memory of what the output lost when it was rounded to 16 bits, in megabytes."""
    heads = 0 if setting["dtype"] == "fp32" else setting["heads"]
    return 2e-6 * timing["B"] * timing["T"] * timing["E"] * heads


def row(length: int, what: str, limit: float, value: float | None, sign: str) -> dict:
    met = None if value is None else (value <= limit if sign == "<=" else value >= limit)
    entry = {"T": length, "what": what, "goal": f"{sign} {limit:.4g}", "value": value}
    return entry | {"met": met, "why": ""}


def ratio(over: dict | None, under: dict | None, what: str) -> float | None:
    values = [(r or {}).get(f"{what}_ms") for r in (over, under)]
    return None if None in values else values[0] / values[1]


def words(what: str) -> str:
    return what.replace("_", " + ")


def cell(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else f"{value:{form}}"


def markdown(report: dict, picture: str) -> str:
    s = report["setting"]
    lines = [
        f"# Attention on {s['device']}",
        "",
        f"{s['dtype']}, {s['heads']} heads, B T = {s['tokens']} tokens, causal; torch "
        f"{s['torch']}, triton {s['triton']}, {s['date']}, `{s['command']}`; medians of the "
        f"device's time over up to {s['repeats']} interleaved repetitions, cache cold.",
    ]
    if s.get("matmul_tflops"):
        lines.append(f"A bf16 product of 8192 cubed ran at {s['matmul_tflops']:.0f} TFLOP/s.")
    lines += ["", picture]
    if goals := compared(report):
        lines += ["", "## Goals", "", "Set for one H200, bf16, heads of 64.", ""]
        lines += ["| T | what | goal | measured | met |", "|---|---|---|---|---|"]
        for g in goals:
            verdict = {None: "not measured", True: "yes", False: "no"}[g["met"]]
            value = g["why"] or cell(g["value"])
            lines.append(f"| {g['T'] or 'all'} | {g['what']} | {g['goal']} | {value} | {verdict} |")
    lines += timing_table(report["timings"])
    lines += ["", "## Largest error against float64, relative to the largest true value", ""]
    lines += ["| variant | T | out | dq | dk | dv | dtheta |", "|---|---|---|---|---|---|---|"]
    for r in report["accuracy"]:
        errors = " | ".join(cell(r.get(key), ".1e") for key in ("out", "dq", "dk", "dv", "dtheta"))
        lines.append(f"| {r['variant']} | {r['T']} | {errors} |")
    if report["skipped"]:
        lines += ["", "## Not measured", "", "| E | T | variant | what | why |"]
        lines.append("|---|---|---|---|---|")
        for r in report["skipped"]:
            what = words(r["what"])
            lines.append(f"| {r['E']} | {r['T']} | {r['variant']} | {what} | {r['why']} |")
    return "\n".join(lines) + "\n"


def timing_table(timings: list[dict]) -> list[str]:
    """Return the table of times, TFLOP/s and memory, with ratios to flash attention."""
    lines = [
        "",
        "## Times",
        "",
        "| E | T | B | variant | forward ms | / flash | TFLOP/s | forward + backward ms | / flash "
        "| TFLOP/s | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    flash = {r["group"]: r for r in timings if r["variant"] == FLASH}
    for r in timings:
        cells = [str(r["E"]), str(r["T"]), str(r["B"]), r["variant"]]
        for what in ("forward", "forward_backward"):
            cells.append(cell(r.get(f"{what}_ms"), ".4g"))
            cells.append(cell(ratio(r, flash.get(r["group"]), what), ".2f"))
            cells.append(cell(r.get(f"{what}_tflops"), ".0f"))
        cells.append(cell(r.get("peak_mb"), ".0f"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(report: dict, path: Path) -> str:
    """Plot the TFLOP/s of forward and backward by length, with one panel for each head size.

    Returns:
        A line for the report: the link to the plot, or the reason why there is none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "No plot: matplotlib is not installed (`pip install matplotlib`)."
    rows = [r for r in report["timings"] if "forward_backward_tflops" in r]
    if not rows:
        return "No plot: nothing has been timed forward and backward yet."
    sizes = sorted({r["E"] for r in rows})
    names = list(dict.fromkeys(r["variant"] for r in rows))
    s = report["setting"]
    title = f"Attention, forward and backward, causal, {s['dtype']}\n{s['device']}, {s['date']}"
    groups = []
    for size in sizes:
        groups.append([])
        for name in names:
            points = {r["T"]: r["forward_backward_tflops"] for r in rows
                      if (r["variant"], r["E"]) == (name, size)}  # fmt: skip
            x = sorted(points)
            groups[-1].append(pictures.Curve(name, x, [points[t] for t in x]))
    figure = pictures.by_length(title, groups, "tokens", "TFLOP/s")
    for axes, size in zip(figure.axes, sizes, strict=True):
        axes.set_title(f"heads of {size}", loc="left", fontsize="medium")
    pictures.save(figure, path)
    return f"![TFLOP/s by length]({path.name})"
