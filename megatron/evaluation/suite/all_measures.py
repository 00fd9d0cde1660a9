"""Run the suite, a set of measures of how a model uses long context, on a checkpoint."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.samples.split import SPLITS
from megatron.data.tasks.base import Task
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.errors import CheckpointError
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import OpenRun, open_run
from megatron.engine.open_text import open_text
from megatron.errors import UserError
from megatron.evaluation.perplexity_statistics import measured_with, scaled
from megatron.evaluation.suite import context, key_tokens, perplexity, recall
from megatron.evaluation.suite.heads import heads
from megatron.evaluation.suite.measure import Measure, Sample, Subject, read_sample
from megatron.evaluation.suite.pointer import pointer
from megatron.evaluation.suite.ruler import ruler
from megatron.evaluation.suite.suite_report import PAGE, Report, write_report
from megatron.evaluation.suite.verdict import verdict
from megatron.parallel.groups import Groups
from megatron.run_folder import RunFolder


def run_suite(
    config: Config, load: Path, *, out: Path | None = None, judge: Path | None = None
) -> Report:
    """Measure the newest checkpoint of the run folder `load`, and write the report into `out`.

    The sequence lengths are the config's `eval_lengths`. Documents shorter than the largest length
    are not read. Call this function in a single process, or in every process of a torchrun job.

    Args:
        config: The config.
        load: The run folder.
        out: The folder for the report; None means `load/suite`.
        judge: The run folder of the model that chooses the key tokens. With None, the measured
            model chooses the key tokens itself.

    Raises:
        CheckpointError: A checkpoint is missing or does not fit its config, or the judge has
            another tokenizer.
        DataError: Fewer than two documents are long enough, or the config's data is a length task.
    """
    with job_or_alone(config) as groups:
        say: Callable[[str], None] = print if groups.is_main else lambda text: None
        run = open_run(load, config, groups)
        say(run.said())
        tokenizer, chosen = run.tokenizer, config.evaluation
        text = open_text(config, tokenizer)
        if isinstance(text, Task):
            raise DataError(f"--suite reads text, and data_path is a length task, {text.name}")
        sample = read_sample(
            text.shards, text.splits[SPLITS.index(chosen.eval_split)],
            tuple(sorted(set(chosen.eval_lengths))), train_length=config.model.seq_length,
            tokens=chosen.eval_suite_tokens, eod=tokenizer.eod,
        )  # fmt: skip
        subject = _subject(run, groups)
        judged = _open_judge(judge, tokenizer, groups, sample.longest) if judge else None
        measures = measure_with_progress(subject, sample, tokenizer, judged)
        title = f"{run.model.pos.name}, trained at {config.model.seq_length:,} tokens"
        title = scaled(title, config)
        facts: dict[str, Any] = {
            "checkpoint": str(run.saved.path),
            "text": f"{chosen.eval_split} of {text.shards.prefix}",
            "sequences": f"{len(sample.documents)} of {sample.longest:,} tokens, from "
            f"{len(np.unique(sample.documents))} different documents",
        }
        about = measured_with(config, run.saved.step, "eval_suite_tokens")
        report = Report(title, about, facts | about, verdict(measures), measures)
        folder = out or RunFolder(load).suite
        if groups.is_main:
            write_report(report, folder, sample.train_length)
        say("\n".join([title, *(f"  {m.says}" for m in measures), *report.verdict]))
        say(f"written to {folder}: {PAGE}, and tables and pictures")
        return report


def measure_with_progress(
    subject: Subject, sample: Sample, tokenizer: Tokenizer, judge: Subject | None = None
) -> list[Measure]:
    """Run all measures, and return the results. A progress bar counts the tokens that are read."""
    counts: list[int] = []
    for each in (subject, judge or subject):
        each.tick, each.loss_fn = counts.append, lambda inputs, targets: torch.zeros(inputs.shape)
    measure_all(subject, sample, tokenizer, judge)  # counts the tokens, without the model
    quiet = not subject.groups.is_main
    interval = 0.2 if sys.stderr.isatty() else 15.0  # a log file gets fewer lines
    with tqdm(
        total=sum(counts), unit="token", unit_scale=True, mininterval=interval, disable=quiet
    ) as bar:
        for each in (subject, judge or subject):
            each.tick, each.loss_fn = bar.update, each.model
        return measure_all(subject, sample, tokenizer, judge) + heads(subject, sample)


def measure_all(
    subject: Subject, sample: Sample, tokenizer: Tokenizer, judge: Subject | None = None
) -> list[Measure]:
    """Run all measures except `heads`, and return the results. Every rank must call this function.

    Args:
        subject: The measured model.
        sample: The text.
        tokenizer: The tokenizer of the text.
        judge: The model that chooses the key tokens: those that it predicts better with long
            context. None means the measured model.
    """

    def passes(of: Subject) -> tuple[np.ndarray, np.ndarray]:
        full_nT = of.losses(sample.sequences_nT)
        return full_nT, of.losses(sample.sequences_nT, window=sample.train_length)

    full_nT, twin_nT = passes(subject)
    gain_nT = key_tokens.judged_gain(*passes(judge) if judge else (full_nT, twin_nT))
    return [
        perplexity.by_length(subject, sample, full_nT, tokenizer.token_bytes),
        perplexity.by_position(sample, full_nT),
        context.receptive_field(subject, sample, full_nT),
        context.exact_context(subject, sample, full_nT),
        context.windowed_twin(sample, full_nT, twin_nT),
        pointer(sample, full_nT, twin_nT),
        context.far_swap(subject, sample, full_nT),
        key_tokens.key_tokens(sample, full_nT, twin_nT, gain_nT, (judge or subject).name),
        recall.induction(subject, sample),
        recall.copying(subject, sample),
        recall.passkey(subject, sample, tokenizer),
        ruler(subject, sample, tokenizer),
    ]


def _subject(run: OpenRun, groups: Groups) -> Subject:
    return Subject(run.model, groups, run.config.evaluation.eval_batch_tokens)


def _open_judge(load: Path, tokenizer: Tokenizer, groups: Groups, longest: int) -> Subject:
    try:
        run = open_run(load, None, groups)
        run.model.embedding.require_positions(longest)
    except UserError as error:
        raise CheckpointError(f"--judge {load}: {error}") from error
    if run.tokenizer.fingerprint() != tokenizer.fingerprint():
        raise CheckpointError(
            f"--judge {load} has another tokenizer than the model, so its tokens are different; "
            "name a run with the same tokenizer"
        )
    return replace(_subject(run, groups), name=str(run.saved.path))
