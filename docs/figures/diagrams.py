"""Draw the diagrams of the pages as SVG files beside this script.

    python docs/figures/diagrams.py

Each diagram has its own background, so it can be read on a light and on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """
.paper { fill: #ffffff; stroke: #d0d4e4 }
.box { fill: #eef1fb; stroke: #5c6bc0; stroke-width: 1.5 }
.own { fill: #fff3e0; stroke: #e65100; stroke-width: 1.5 }
.file { fill: #e8f5e9; stroke: #2e7d32; stroke-width: 1.5 }
.group { fill: none; stroke: #8a8fa8; stroke-dasharray: 5 4 }
.arrow { fill: none; stroke: #444a66; stroke-width: 1.5; marker-end: url(#tip) }
#tip path { fill: #444a66 }
text { fill: #1b1f33; font: 14px system-ui, sans-serif; text-anchor: middle }
.small { font-size: 12px; fill: #444a66 }
@media (prefers-color-scheme: dark) {
.paper { fill: #1e2129; stroke: #3a3f52 }
.box { fill: #2b3046; stroke: #9fa8da }
.own { fill: #40301d; stroke: #ffb74d }
.file { fill: #203524; stroke: #81c784 }
.arrow { stroke: #b9bfd8 }
#tip path { fill: #b9bfd8 }
text { fill: #eceffa }
.small { fill: #b9bfd8 }
}
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text; `kind` is a class of `STYLE`."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: str = "box"

    def svg(self) -> str:
        """Return the rectangle and its text."""
        lines = self.text.split("\n")
        shape = (
            f'<rect class="{self.kind}" x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="8"/>'
        )
        top = self.y + 16 if self.kind == "group" else self.middle[1] - 9 * (len(lines) - 1) + 5
        return shape + "".join(
            text(self.middle[0], top + 18 * i, line, small=i > 0 or self.kind == "group")
            for i, line in enumerate(lines)
        )

    @property
    def middle(self) -> tuple[float, float]:
        """The point in the middle."""
        return self.x + self.width / 2, self.y + self.height / 2


def text(x: float, y: float, line: str, *, small: bool = False) -> str:
    """Return a line of text whose middle is at x."""
    mark = ' class="small"' if small else ""
    return f'<text{mark} x="{x:g}" y="{y:g}">{escape(line)}</text>'


def arrow(start: Box, end: Box, label: str = "") -> str:
    """Return an arrow between the sides of two boxes that face each other."""
    (x, y), (u, v) = start.middle, end.middle
    if end.x >= start.x + start.width or start.x >= end.x + end.width:
        right = end.x >= start.x + start.width
        x = start.x + start.width if right else start.x
        u = end.x - 4 if right else end.x + end.width + 4
    else:
        down = end.y > start.y
        y = start.y + start.height if down else start.y
        v = end.y - 4 if down else end.y + end.height + 4
    line = f'<path class="arrow" d="M{x:g} {y:g} L{u:g} {v:g}"/>'
    return line + (text((x + u) / 2, (y + v) / 2 - 6, label, small=True) if label else "")


def drawing(title: str, width: int, height: int, parts: list[str]) -> str:
    """Return the text of an SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
        f'<rect class="paper" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def data_flow() -> str:
    """Draw the way from text to a trained and measured model."""
    raw = Box(20, 30, 120, 56, "text\nJSONL, code, ...", "file")
    prepare = Box(180, 30, 140, 56, "prepare_data.py\ntokens")
    shards = Box(360, 30, 140, 56, "shards\n.bin and .idx", "file")
    samples = Box(540, 30, 160, 56, "samples\nin the seed's order")
    model = Box(540, 140, 160, 56, "model\ntheta goes along")
    loss = Box(360, 140, 140, 56, "loss\nof each token")
    step = Box(180, 140, 140, 56, "DeepSpeed\nbackward, update")
    theta = Box(20, 140, 120, 56, "theta\ninto its bounds", "own")
    run = Box(180, 262, 320, 56, "run folder\ncheckpoints, config.yml, metrics.jsonl", "file")
    use = Box(540, 262, 160, 56, "use\nmeasure, generate")
    train = Box(10, 112, 700, 96, "train.py, each step", "group")
    parts = [train, raw, prepare, shards, samples, model, loss, step, theta, run, use]
    ways = [(raw, prepare), (prepare, shards), (shards, samples), (samples, model)]
    ways += [(model, loss), (loss, step), (step, theta), (step, run), (run, use)]
    arrows = [arrow(*way) for way in ways]
    return drawing("From text to a model", 720, 340, [*(box.svg() for box in parts), *arrows])


def layouts() -> str:
    """Draw 8 processes: two stages, two replicas, two tensor-parallel slices each."""
    parts = []
    stages = []
    for stage in range(2):
        left = 20 + 350 * stage
        name = ("embedding, layers 1 to 6", "layers 7 to 12, output")[stage]
        box = Box(left, 20, 320, 250, f"pipeline stage {stage}: {name}", "group")
        parts.append(box.svg())
        stages.append(box)
        for replica in range(2):
            top = 50 + 108 * replica
            group = f"replica {replica}: half of each batch"
            parts.append(Box(left + 10, top, 300, 100, group, "group").svg())
            for part in range(2):
                rank = 4 * stage + 2 * replica + part
                half = ("first", "second")[part]
                cell = f"rank {rank}\n{half} half of heads\nand matrices"
                parts.append(Box(left + 20 + 142 * part, top + 26, 136, 66, cell).svg())
    sent = "stages exchange hidden states and theta, replicas exchange gradients,"
    parts.append(text(355, 298, sent, small=True))
    parts.append(
        text(355, 316, "the two ranks of a replica exchange sums in each layer", small=True)
    )
    parts.append(arrow(stages[0], stages[1]))
    return drawing("A layout of 8 processes", 710, 340, parts)


def checkpoint() -> str:
    """Draw how a checkpoint is saved, and how a run resumes from it."""
    state = Box(20, 30, 150, 56, "state of each rank\nweights, moments, ...")
    copy = Box(20, 126, 150, 56, "copy in memory\nwith async_save")
    hidden = Box(230, 30, 190, 56, ".unfinished-global_stepN\nfiles and checksums", "file")
    ready = Box(500, 30, 190, 56, "global_stepN\ncomplete, or not there", "file")
    latest = Box(500, 126, 190, 56, "latest\nnames it", "file")
    check = Box(500, 222, 190, 56, "check\nsizes and checksums")
    same = Box(230, 222, 190, 56, "same layout\nresumes bit for bit")
    other = Box(230, 312, 190, 56, "another layout\nconverted, up to rounding", "own")
    older = Box(500, 312, 190, 56, "damaged\n--allow-fallback: an older one")
    boxes = [state, copy, hidden, ready, latest, check, same, other, older]
    arrows = [
        arrow(state, hidden, "write"), arrow(state, copy), arrow(copy, hidden),
        arrow(hidden, ready, "rename"), arrow(ready, latest), arrow(latest, check),
        arrow(check, same), arrow(check, other), arrow(check, older),
    ]  # fmt: skip
    return drawing("A checkpoint", 710, 388, [*(box.svg() for box in boxes), *arrows])


def attention_core() -> str:
    """Draw the operations of one call of attention, in their order."""
    q = Box(20, 30, 110, 50, "q\nqueries", "file")
    k = Box(20, 100, 110, 50, "k\nkeys", "file")
    v = Box(20, 210, 110, 50, "v\nvalues", "file")
    theta = Box(170, 132, 130, 56, "theta\n[heads, n], learned", "own")
    product = Box(170, 50, 130, 56, "q · k / √E\n(rotated if rotary)")
    kernel = Box(340, 132, 150, 56, "distance kernel\nw(d) and b(d)", "own")
    scores = Box(340, 50, 150, 56, "× t(i) × w(d) + b(d)\n+ cᵢ − cⱼ")
    mask = Box(530, 50, 160, 56, "mask\npast, document, window")
    softmax = Box(530, 132, 160, 56, "softmax\nwith a sink if asked for")
    out = Box(530, 207, 160, 56, "weights × v\noutput")
    boxes = [q, k, v, theta, product, kernel, scores, mask, softmax, out]
    ways = [(q, product), (k, product), (product, scores), (theta, kernel), (kernel, scores)]
    ways += [(scores, mask), (mask, softmax), (softmax, out), (v, out)]
    parts = [*(box.svg() for box in boxes), *(arrow(*way) for way in ways)]
    return drawing("The core of attention", 710, 285, parts)


DRAWINGS = {
    "attention_core": attention_core,
    "checkpoint": checkpoint,
    "data_flow": data_flow,
    "layouts": layouts,
}


def main() -> None:
    """Write all diagrams."""
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
