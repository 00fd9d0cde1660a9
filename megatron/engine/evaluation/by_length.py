"""Perplexity at every length as table, CSV and pictures, from a live engine or a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.samples.evaluation import eval_sequences, eval_span
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import DTYPES, build_model, identity_of, tokenizer_of
from megatron.engine.checkpoint import saved as checkpoint
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.evaluation.losses import LossFn, by_length, limited_context
from megatron.engine.evaluation.report import LengthResult, write_extrapolation, write_kernels
from megatron.engine.job import join as distributed
from megatron.engine.text import SPLITS, evaluation_text
from megatron.parallel import Groups, build_groups
from megatron.positional import PositionalEmbedding


def evaluate(
    config: Config,
    load: Path,
    lengths: Sequence[int],
    *,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[LengthResult]:
    """Evaluate the newest checkpoint in `load` at `lengths` (alone, or in a torchrun job).

    Args:
        out: folder for the CSV and the pictures; None writes them into `load`.

    Raises:
        CheckpointError: there is no checkpoint in `load`, or it does not fit the config.
    """
    if "RANK" in os.environ:
        with distributed.job(backend=config.parallel.distributed_backend) as groups:
            return _evaluate(config, groups, load, lengths, out, say)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _evaluate(config, build_groups(device), load, lengths, out, say)


def _evaluate(
    config: Config,
    groups: Groups,
    load: Path,
    lengths: Sequence[int],
    out: Path | None,
    say: Callable[[str], None],
) -> list[LengthResult]:
    tag = checkpoint.newest(load)
    if tag is None:
        raise checkpoint.CheckpointError(
            f"{load} holds no checkpoint (no file `latest`); name the `save` folder of a run"
        )
    tokenizer = tokenizer_of(config)
    model = build_model(
        config, tokenizer.vocab_size, device_type=groups.device.type, training=False
    )
    notes = load_weights(model, load, tag, identity_of(config, model, tokenizer))
    model = model.to(device=groups.device, dtype=DTYPES[config.training.precision]).eval()
    shards, splits = evaluation_text(config, tokenizer)
    if groups.is_main:
        say("\n".join([f"evaluating {load / tag}", *notes]))
    return extrapolate(
        config,
        groups,
        loss_fn=model,
        pos=model.pos,
        theta_HN=None if model.theta is None else model.theta.detach().float().cpu(),
        shards=shards,
        splits=splits,
        tokenizer=tokenizer,
        run_dir=out or load,
        lengths=lengths,
        say=say if groups.is_main else lambda text: None,
    )


def extrapolate(
    config: Config,
    groups: Groups,
    *,
    loss_fn: LossFn,
    pos: PositionalEmbedding,
    theta_HN: torch.Tensor | None,
    shards: ShardReader,
    splits: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    run_dir: Path,
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> list[LengthResult]:
    """Evaluate `loss_fn` at `lengths`; print the table and write the files into `run_dir`."""
    chosen = config.evaluation
    lengths = sorted(set(lengths))
    documents = splits[SPLITS.index(chosen.eval_split)]
    span = eval_span(shards, documents, lengths, chosen.eval_tokens)
    if span == 0:
        raise DataError(
            f"the {chosen.eval_split} split ({documents[1] - documents[0]} documents) is shorter "
            f"than one sequence of {max(lengths)} tokens; evaluate shorter lengths, or give it a "
            "larger part of `split`"
        )
    results = by_length(
        loss_fn,
        lambda length: eval_sequences(shards, documents, length, span),
        lengths,
        groups,
        token_bytes=tokenizer.token_bytes,
        batch_tokens=chosen.eval_batch_tokens,
        say=say,
    )
    train_length = config.model.seq_length
    baselines = {}
    if context := chosen.eval_context_baseline:
        options = {
            "token_bytes": tokenizer.token_bytes,
            "batch_tokens": chosen.eval_batch_tokens,
        }
        [cut] = by_length(
            loss_fn,
            lambda length: eval_sequences(shards, documents, length, span),
            [context],
            groups,
            **options,
        )
        baselines[f"the text cut into pieces of {context} tokens"] = cut
        baselines[f"the {context} tokens before each scored one"] = limited_context(
            loss_fn,
            eval_sequences(shards, documents, max(lengths), span),
            context,
            groups,
            targets=max(1, span // context),
            **options,
        )
    if groups.is_main:
        title = f"{config.model.pos_emb}, trained at {train_length}"
        say(
            write_extrapolation(
                results, run_dir, train_length=train_length, baselines=baselines, title=title
            )
        )
        if pos.kind == "distance":
            draw_kernels(pos, theta_HN, config, max(lengths), run_dir / "kernels.png")
        say(f"written to {run_dir}: extrapolation.csv and pictures")
    return results


def draw_kernels(
    pos: PositionalEmbedding,
    theta_HN: torch.Tensor | None,
    config: Config,
    longest: int,
    path: Path,
) -> None:
    """Plot each head's b_h(d) (and w_h(d)) up to `longest`."""
    if theta_HN is None:  # fixed slopes
        heads = config.model.num_attention_heads
        theta_HN = pos.initial_theta(heads, torch.Generator())
    distances = torch.logspace(0, math.log10(longest), 400).long().unique()
    bias, weight = pos.bias(theta_HN, distances), pos.weight(theta_HN, distances)
    write_kernels(
        None if bias is None else bias.numpy(),
        distances.numpy(),
        None if weight is None else weight.numpy(),
        config.model.seq_length,
        path,
    )
