"""Describe a job at its start: its model, devices, kernels, text and first step."""

from megatron.config import Config
from megatron.config.describe import doubts
from megatron.cpu_settings import described_waiting
from megatron.data.tasks.base import Task
from megatron.engine.build import describe_attention
from megatron.engine.checkpoint.resume import Start
from megatron.engine.local_model import Model, count_parameters
from megatron.engine.open_text import Text
from megatron.engine.training.deepspeed_engine import optimizer_of
from megatron.model.block_norm import apex_norm
from megatron.parallel.groups import Groups


def first_lines(
    c: Config, groups: Groups, model: Model, text: Text | Task, start: Start, step: int
) -> list[str]:
    """Return the first lines of a job's log. Every rank must call this function.

    Args:
        step: The number of optimizer steps taken before this job.
    """
    shared = f", context {groups.context.size}" if groups.context.size > 1 else ""
    choices = {"optimizer": optimizer_of(c)[1], "norm": apex_norm(model.shape.block)[1]}
    count = count_parameters(model, groups)
    lines = [
        f"{count:,} parameters, {model.pos.name}, {c.training.precision}, "
        f"ZeRO-{c.parallel.zero_stage}, {groups.pipe_size} x {groups.data_size} x "
        f"{groups.model.size} {groups.device.type} (stages x data x tensor){shared}",
        *describe_attention(model.attends),
        *(f"{part}: {choice}" for part, choice in choices.items() if choice),
        *([f"threads: {described_waiting()}"] if groups.device.type == "cpu" else []),
        text.about,
        start.text,
        *doubts(c),
    ]
    left = c.training.train_iters - step
    if left > 0:
        batch, length = c.batch.train_batch_size, c.model.seq_length
        lines.append(
            f"to do: {left:,} steps of {batch:,} x {length:,} tokens, "
            f"{left * batch * length:,} in all; into {c.checkpoint.save or 'no folder'}"
        )
    if step >= c.training.train_iters > 0:
        lines.append(f"step {step} of {c.training.train_iters}: nothing to train")
    return lines
