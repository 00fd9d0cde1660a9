"""Measure losses on the splits `valid` and `test`, during or after training or as in GPT-NeoX."""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.data.tasks.base import Task
from megatron.engine.job_data import JobData
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.pipeline_engine import (
    Engine,
    PipelineLosses,
    loss_function,
    loss_of_batches,
)
from megatron.evaluation.accuracy import accuracy_at
from megatron.evaluation.by_length import measurement_of
from megatron.parallel.loss import perplexity


def validation(data: JobData, engine: Engine, step: int) -> dict[str, float]:
    """Run the validation after training step `step`, and return its metrics.

    The metrics contain `validation/loss`. If `step` is a multiple of `eval_lengths_interval`, the
    metrics also contain the losses by length. Every rank must call this function.
    """
    t, interval = data.config.training, data.config.evaluation.eval_lengths_interval
    found = {}
    if t.eval_iters:
        before = max(0, step // t.eval_interval - 1)  # one that is owed since another interval
        loss = held_out_loss(data, engine, "valid", before)
        found = {} if loss is None else {"validation/loss": loss}
    if interval and step % interval == 0:
        engine.eval()
        found |= _by_length(data, loss_function(engine, data.groups))
        engine.train()
    return found


def _by_length(data: JobData, model: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Return the validation loss at each of `eval_lengths`, as a dict from metric name to loss.

    Raises:
        DataError: The text is shorter than one sequence of the largest length.
    """
    # The name is `validation/loss_at_L` for the length L. For a length task, the accuracies
    # `validation/exact_at_L` are returned instead of losses. In a pipelined job, the dict is empty
    # for a length task.
    config, groups, chosen = data.config, data.groups, data.config.evaluation
    lengths = sorted(set(chosen.eval_lengths))
    if isinstance(data.text, Task):
        if isinstance(model, PipelineLosses):
            return {}
        sizes = (chosen.eval_examples, groups, chosen.eval_batch_tokens)
        exact = {n: accuracy_at(model, data.text, n, *sizes).exact for n in lengths}
        return {f"validation/exact_at_{length}": each for length, each in exact.items()}
    batch = config.batch.train_batch_size * config.model.seq_length
    tokens = max(config.training.eval_iters * batch, *lengths)
    measurement, _ = measurement_of(config, groups, model, data.tokenizer, data.text, tokens)
    return {f"validation/loss_at_{n}": measurement.at_length(n).loss for n in lengths}


def held_out_loss(
    data: JobData, engine: Engine, name: str, evaluations_before: int
) -> float | None:
    """Return the mean loss on a split, or None if the split has no batches.

    Every rank must call this function.

    Args:
        name: The name of the split, `valid` or `test`.
        evaluations_before: The number of earlier evaluations. The batches that they read are
            skipped.
    """
    loader = data.held_out(name, evaluations_before=evaluations_before)
    if loader is None:
        return None
    count = data.config.training.eval_iters * data.config.batch.gradient_accumulation_steps
    return loss_of_batches(engine, loader, count, data.groups, data.counting)


def log_final_losses(data: JobData, engine: Engine, log: RunLog, step: int) -> None:
    """Measure and log the losses on the splits `valid` and `test` after training, at step `step`.

    Every rank must call this function.
    """
    t = data.config.training
    validations = min(step, t.train_iters) // t.eval_interval
    for name, before in (("valid", validations), ("test", 0)):
        loss = held_out_loss(data, engine, name, before)
        if loss is not None:
            text = f"{name} loss after training: {loss:.4f}"
            log.metrics(step, {f"final/{name}_loss": loss}, text)


def log_published_losses(data: JobData, engine: Engine, log: RunLog, step: int) -> None:
    """Log the losses that GPT-NeoX prints with `train_iters: 0`, measured on the same batches.

    The batches are those that GPT-NeoX would read from the splits `valid` and `test`. Every rank
    must call this function.

    Args:
        step: The number of optimizer steps that the model was trained for.
    """
    # The perplexity is logged, too.
    config = data.config
    wanted = config.training.eval_iters * config.batch.gradient_accumulation_steps
    for name in ("valid", "test"):
        loader = data.held_out_at(name, iteration=step)
        count = 0 if loader is None else min(wanted, loader.batches_left)
        if loader is None or count == 0:
            log.line(f"{name}: the split holds no batch to evaluate")
            continue
        first = loader.consumed_samples
        counting = replace(data.counting, per_token=False)
        loss = loss_of_batches(engine, loader, count, data.groups, counting)
        short = f", all that are left of {wanted} batches" if count < wanted else ""
        sequences = count * loader.micro_batch * loader.dp_size
        text = (
            f"{name} loss at iteration {step}: {loss:.6f} | perplexity "
            f"{perplexity(loss):.4f} | {sequences} sequences of "
            f"{config.model.seq_length_val} tokens, from sample {first} on{short}"
        )
        values = {f"final/{name}_loss": loss, f"final/{name}_ppl": perplexity(loss)}
        log.metrics(step, values, text)
