"""Open a run folder and load its model, for evaluation, generation and export."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.config import Config, load_config
from megatron.config.command_line import sharing_layout
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import plan_of, tokenizer_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved, require_newest
from megatron.engine.errors import CheckpointError
from megatron.engine.job.job_or_alone import alone
from megatron.engine.model_shape import DTYPES, identity_of
from megatron.model import GPT
from megatron.model.embedding import scale_distances
from megatron.parallel.groups import Groups
from megatron.run_folder import RunFolder


@dataclass(frozen=True)
class OpenRun:
    """A run's model with the weights of its newest checkpoint, for inference.

    Attributes:
        config: The configuration with which the model was built.
        tokenizer: The tokenizer that the config names.
        model: The model, or this rank's tensor-parallel shard of it.
        saved: The checkpoint from which the model's weights were loaded.
        notes: Lines to print for the user.
    """

    config: Config
    tokenizer: Tokenizer
    model: GPT
    saved: Saved
    notes: list[str]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    def said(self) -> str:
        """Return lines for the log: `evaluating PATH OF CHECKPOINT`, then `self.notes`."""
        return "\n".join([f"evaluating {self.saved.path}", *self.notes])


def open_run(
    folder: Path,
    config: Config | None = None,
    groups: Groups | None = None,
    *,
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
) -> OpenRun:
    """Build the model of the run folder `folder`, with the weights of its newest checkpoint.

    The model has the config's precision and is on this rank's device. Every rank must call this
    function.

    Args:
        config: The configuration. None means that the configuration is read from `files` and
            `overrides`, and that each process loads the whole model.
        groups: The job's process groups; None means that this process is alone.
        files: Config files; without any, the run's `config.yml` is read.
        overrides: Config overrides, `key=value`.

    Raises:
        AttentionError: The attention backend does not support this model on this device.
        CheckpointError: `folder` holds no checkpoint or no `config.yml`, or the checkpoint is
            damaged or does not fit the config.
        ConfigError: The configuration has problems.
    """
    # The model multiplies all query-key distances by `eval_distance_scale`. The ranks of
    # `groups.model` share the model.
    groups = groups or alone()
    if config is None:
        stored = RunFolder(folder).config
        if not files and not stored.is_file():
            text = "name the config files with --config, or another folder"
            raise CheckpointError(f"{folder} has no config.yml; {text}")
        given = ["attention_backend=auto", *overrides, *sharing_layout(1)]
        config = load_config(files or [stored], given)
    tokenizer = tokenizer_of(config)
    saved = require_newest(folder)
    saved.require_intact(groups, optimizer=False)
    size, eod, kind = tokenizer.vocab_size, tokenizer.eod, groups.device.type
    plan = plan_of(config, size, device_type=kind, eod=eod, training=False, tp=groups.model)
    model = GPT(plan)
    run = RunDescription(model=identity_of(config, model.shape, tokenizer))
    notes = load_weights(model, saved, run, groups)
    if saved.step < config.checkpoint.retrofit_anneal:
        notes.append(
            f"step {saved.step} of retrofit_anneal {config.checkpoint.retrofit_anneal}: this model "
            "still had a part of its old positions in training, and has none of it here"
        )
    scale_distances(model, config.evaluation.eval_distance_scale)
    model = model.to(device=groups.device, dtype=DTYPES[config.training.precision]).eval()
    return OpenRun(config, tokenizer, model, saved, notes)
