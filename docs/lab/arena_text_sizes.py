"""Count the tokens of the arena's three texts, for the table of its page (arena_results.md).

    python docs/lab/arena_text_sizes.py
    python docs/lab/lab_tables.py

The texts must be prepared, as for rebuild_arena.py. The table is tables/arena_text_sizes.csv:
documents in all, tokens in the training split, how often the runs pass over them, bytes in a token,
documents of the test split that are long enough, the measured documents and sequences, and how many
runs of 32 tokens of the measured sequences are also in the training split.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy as np
import pandas as pd
from arena_page import TABLES
from rebuild_arena import GRID, ROOT, variables_of

from megatron.engine.build import tokenizer_of
from megatron.engine.open_text import open_text
from megatron.evaluation.suite.measure import REPEATED, read_sample
from tools.experiments.grid import read_grid


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    os.chdir(ROOT)  # the grid's paths are relative to it
    table = pd.DataFrame(map(sizes, ("code", "prose", "latex")))
    table.to_csv(TABLES / "arena_text_sizes.csv", index=False)
    print(table.to_string(index=False))
    return 0


def sizes(name: str) -> dict[str, Any]:
    config = read_grid(ROOT / GRID, variables_of(name)).cells[0].config()
    tokenizer = tokenizer_of(config)
    text = open_text(config, tokenizer)
    (start, end), _, test = text.splits
    shards, lengths = text.shards, tuple(sorted(config.evaluation.eval_lengths))
    train = slice(start, end)
    begins = shards.pointers[train] // shards.dtype.itemsize
    trained = np.concatenate(
        [shards.tokens[b : b + n] for b, n in zip(begins, shards.sizes[train], strict=True)]
    )
    sample = read_sample(
        shards, test, lengths, train_length=config.model.seq_length,
        tokens=config.evaluation.eval_suite_tokens, eod=tokenizer.eod,
    )  # fmt: skip
    seen = {*runs(trained[None]).ravel().tolist()}
    found = runs(sample.sequences_nT)
    read = config.training.train_iters * config.batch.train_batch_size * config.model.seq_length
    return {
        "text": name,
        "documents": len(shards.sizes),
        "tokens of the training split": f"{len(trained):,}",
        "passes": f"{read / len(trained):.2f}",
        "bytes in a token": f"{tokenizer.token_bytes(trained).mean():.2f}",
        "long test documents": int((shards.sizes[slice(*test)] > lengths[-1]).sum()),
        "measured": len(np.unique(sample.documents)),
        "sequences": len(sample.documents),
        "repeated": f"{np.mean([run in seen for run in found.ravel().tolist()]):.1%}",
    }


def runs(tokens_nT: np.ndarray) -> np.ndarray:
    """Return a hash of each run of `REPEATED` tokens, [n, T - REPEATED + 1]."""
    factors = np.random.default_rng(0).integers(1 << 62, size=REPEATED)
    wide = np.asarray(tokens_nT, np.int64)
    return np.lib.stride_tricks.sliding_window_view(wide, REPEATED, axis=1) @ factors


if __name__ == "__main__":
    sys.exit(main())
