"""Draw Figures 5, 6 and 7 of the paper for your own runs.

    python docs/lab/paper_figures.py positions RUN... --length 4096 --window 512 --out DIR
    python docs/lab/paper_figures.py effective RUN... --out DIR

`positions` (Figure 5; Figure 7 with `--length 16384`) measures the perplexity at each position of a
sequence: the exponential of the mean loss over sequences. The first run is measured a second time
as its windowed twin: each layer sees only the last `--window` tokens. The text is the split
`eval_split` of the first run, cut into `--sequences` sequences.

`effective` (Figure 6) counts the heads whose kernel has fallen below -2 at a distance d or before:
their effective length is at most d. The runs need a kernel of the distance with a bias, such as
`kerple_log`, and are not measured on a text.

Each command writes a CSV and a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from megatron import pictures
from megatron.config import load_config
from megatron.data.samples.evaluation import eval_sequences
from megatron.data.samples.split import SPLITS
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import OpenRun, open_run
from megatron.engine.open_text import open_text
from megatron.evaluation.losses import scores_of_sequences
from megatron.model.block import limited_window
from megatron.positional import PositionalEmbedding

BIN = 64
"""Positions whose losses are averaged for one point of the picture."""
FARTHEST = 20_480
"""The largest distance of Figure 6."""
STRONG = -2.0
"""The bias below which the paper calls the attenuation strong."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", choices=("positions", "effective"))
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV and picture")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--window", type=int, default=512, help="tokens that the twin sees")
    parser.add_argument("--sequences", type=int, default=320)
    given = parser.parse_args(arguments)
    if given.figure == "positions":
        table = positions(given.runs, given.length, given.window, given.sequences)
        drawn = by_position(table, given.window)
    else:
        table = effective_lengths(given.runs)
        drawn = by_distance(table)
    given.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(given.out / f"{given.figure}.csv", index=False, float_format="%.6g")
    pictures.save(drawn, given.out / f"{given.figure}.png")
    print(f"written to {given.out}: {given.figure}.csv and {given.figure}.png")
    return 0


def positions(runs: Sequence[Path], length: int, window: int, sequences: int) -> pd.DataFrame:
    """Return the perplexity of each run in bins of positions, and that of the first run's twin.

    Args:
        length: The number of tokens of a sequence.
        window: The number of tokens that each layer of the twin sees.
        sequences: The largest number of sequences.
    """
    first = load_config([runs[0] / "config.yml"])
    rows = []
    with job_or_alone(first) as groups:
        for run in runs:
            config = load_config([run / "config.yml"])
            opened = open_run(run, config, groups)
            text = open_text(first, opened.tokenizer)
            documents = text.splits[SPLITS.index(first.evaluation.eval_split)]
            sequences_nT = eval_sequences(text.shards, documents, length, length * sequences)
            for limit in (None, window) if run == runs[0] else (None,):
                with limited_window(opened.model, limit) if limit else nullcontext():
                    losses_nT = scores_of_sequences(
                        opened.model, sequences_nT, groups, width=length,
                        batch_tokens=config.evaluation.eval_batch_tokens,
                        score=lambda losses_BT, inputs_BT: losses_BT,
                    )  # fmt: skip
                name = opened.model.pos.name + (f", windowed at {limit}" if limit else "")
                rows += in_bins(losses_nT.mean(0), run, name, len(sequences_nT))
    return pd.DataFrame(rows)


def in_bins(loss_T: np.ndarray, run: Path, name: str, sequences: int) -> list[dict[str, Any]]:
    """Return the perplexity of each bin: the mean, over its positions, of exp(mean loss)."""
    return [
        {"run": str(run), "model": name, "sequences": sequences, "first_position": start,
         "perplexity": float(np.exp(loss_T[start : start + BIN]).mean())}
        for start in range(0, len(loss_T), BIN)
    ]  # fmt: skip


def effective_lengths(runs: Sequence[Path]) -> pd.DataFrame:
    """Return, for each run and distance, the number of heads whose bias is below -2 by then."""
    rows = []
    for run in runs:
        config = load_config([run / "config.yml"])
        with job_or_alone(config) as groups:
            opened = open_run(run, config, groups)
        for layer, lengths_H in enumerate(lengths_of_heads(opened)):
            counts = np.bincount(lengths_H, minlength=FARTHEST + 2)[: FARTHEST + 1].cumsum()
            changes = np.flatnonzero(np.diff(counts, prepend=-1))
            rows += [
                {"run": str(run), "model": opened.model.pos.name, "kernel": layer,
                 "distance": int(d), "heads": int(counts[d]), "of": len(lengths_H)}
                for d in sorted({*changes, FARTHEST})
            ]  # fmt: skip
    return pd.DataFrame(rows)


def lengths_of_heads(opened: OpenRun) -> list[np.ndarray]:
    """Return the effective length of each head, for each kernel of the model.

    The effective length is the smallest distance with a bias below -2, and `FARTHEST` + 1 if no
    distance up to `FARTHEST` has one.
    """
    model, distances = opened.model, torch.arange(FARTHEST + 1)
    theta_HN = model.embedding.theta_in(torch.float32)
    theta_HN = torch.empty(0) if theta_HN is None else theta_HN.detach().cpu()
    kernels: dict[tuple[PositionalEmbedding, int], np.ndarray] = {}
    for index in range(opened.config.model.num_layers):
        pos, columns = model.pos.of_layer(index)
        part, part_HN = pos.kernel_part(theta_HN[..., columns])
        bias_HD = None if part_HN is None else part.bias_at(part_HN, distances, distances)
        if bias_HD is None:
            raise SystemExit(f"{opened.saved.path}: {pos.name} has no bias that falls")
        below_HD = (bias_HD < STRONG).numpy()
        found_H = np.where(below_HD.any(1), below_HD.argmax(1), FARTHEST + 1)
        kernels.setdefault((pos, columns.start or 0), found_H)
    return list(kernels.values())


@pictures.in_style()
def by_position(table: pd.DataFrame, window: int) -> Any:
    """Draw the perplexity of each model by position."""
    figure, (axes,) = pictures.panels("Perplexity by position")
    for (_, name), rows in table.groupby(["run", "model"], sort=False):
        twin = "windowed" in name
        middles, style = rows.first_position + BIN / 2, "--" if twin else "-"
        axes.plot(middles, rows.perplexity, label=name, ls=style, marker="")
    axes.axvline(window, color="grey", lw=1)
    ends = table[table.first_position >= window].perplexity
    axes.set(xlabel="position", ylabel="perplexity", ylim=(0, 2 * ends.median()))
    axes.legend()
    return figure


@pictures.in_style()
def by_distance(table: pd.DataFrame) -> Any:
    """Draw the number of heads whose effective length is at most d, by d."""
    figure, (axes,) = pictures.panels("Heads whose effective length is at most d")
    for (run, name, kernel), rows in table.groupby(["run", "model", "kernel"], sort=False):
        several = table[table.run == run].kernel.nunique() > 1
        label = f"{Path(run).name}: {name}" + (f", kernel {kernel}" if several else "")
        axes.step(rows.distance.clip(lower=1), rows.heads, where="post", label=label, marker="")
    axes.set(xlabel="distance d (tokens)", ylabel="heads", xscale="log")
    axes.yaxis.get_major_locator().set_params(integer=True)
    pictures.plain_ticks(axes.xaxis, 1, FARTHEST)
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
