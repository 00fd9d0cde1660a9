"""A whole training job, from a config to a trained, saved and evaluated model."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.data.errors import ShardError
from megatron.engine.build import identity_of
from megatron.engine.checkpoint import saved as checkpoint
from megatron.engine.checkpoint.full_weights import describe
from megatron.engine.checkpoint.resume import choose_start
from megatron.engine.checkpoint.saved import Progress
from megatron.engine.evaluation.by_length import extrapolate
from megatron.engine.job import join as distributed
from megatron.engine.job.agreement import require_alike, settings_of
from megatron.engine.text import JobData
from megatron.engine.training.job_engine import job_engine, sub_group_size
from megatron.engine.training.log import RunLog
from megatron.engine.training.loop import LoopSettings, losses_of, train_loop, validation_loss
from megatron.engine.training.optimizer import all_heads, full_theta
from megatron.engine.training.own_part import build_own_part, count_parameters
from megatron.parallel import Groups

UNSAVED = Path("runs/unsaved")
"""Where reports go when the config names no `save` folder."""


def train(config: Config, *, verbose: bool = False, allow_fallback: bool = False) -> None:
    """Train (resuming where `load` allows), save, and evaluate as the config says.

    With `allow_fallback` a damaged newest checkpoint is passed over for the one before it.

    Raises:
        ConfigError, ShardError, CheckpointError, DivergedError: with what to do in the text.
    """
    backend = config.parallel.distributed_backend
    with distributed.job(backend=backend, verbose=verbose) as groups:
        Job(config, groups, allow_fallback=allow_fallback).run()


class Job:
    """The parts of one training job, built in the order in which data flows."""

    def __init__(self, config: Config, groups: Groups, *, allow_fallback: bool = False):
        parallel = config.parallel
        groups = groups.divided(
            model_size=parallel.model_parallel_size,
            pipe_size=parallel.pipe_parallel_size,
            context_size=parallel.context_parallel_size,
            cuts_sequence=parallel.sequence_parallel,
        )
        self.config, self.groups = config, groups
        save = config.checkpoint.save
        self.run_dir = Path(save) if save else UNSAVED
        require_alike(groups, "config", settings_of(config))
        self.data = JobData(config, groups)
        require_alike(groups, "text", self.data.identity)
        self.layout = {
            "data_parallel_size": groups.data_size,
            "model_parallel_size": groups.model.size,
            "pipe_parallel_size": groups.pipe_size,
            "context_parallel_size": groups.context.size,
            "zero_stage": parallel.zero_stage,
            "sub_group_size": sub_group_size(config),
            "precision": config.training.precision,
            "optimizer": config.optimizer.type,
            "weight_decay_positional": config.optimizer.weight_decay_positional,
        }
        # Dropout: each data- and context-parallel rank and stage its own stream.
        stream = groups.pipe_rank * groups.replica_size + groups.replica_rank
        torch.manual_seed(config.training.seed + stream)
        self.model = build_own_part(config, self.data.tokenizer.vocab_size, groups)
        self.about = {
            "model": identity_of(config, self.model, self.data.tokenizer),
            "data": self.data.identity,
            "layout": self.layout,
            **describe(self.model, groups),
        }
        self.start = choose_start(
            config, groups, self.data.wanted["train"], allow_fallback=allow_fallback
        )
        self.start.load_weights(self.model, self.about, groups)
        self.engine, self.schedule = job_engine(config, self.model, groups)
        self.progress = self.start.finish(self.engine, self.schedule, groups, self.about)

    def run(self) -> None:
        """Train to `train_iters`, then evaluate."""
        config, groups = self.config, self.groups
        step = self.progress.step
        with RunLog(
            self.run_dir,
            is_main=groups.is_main,
            use_wandb=config.logging.use_wandb,
            wandb_options=self._wandb_options(),
            config=config.to_flat_dict(),
            append=step > 0 or config.training.train_iters == 0,
            last_step=step if config.training.train_iters else None,
        ) as log:
            self._announce(log)
            if step < config.training.train_iters:
                self._train(log)
                if self.progress.step < config.training.train_iters:
                    return  # left early: not the end that is evaluated
            if config.training.eval_iters > 0:
                (self._final_losses if config.training.train_iters else self._evaluate)(log)
            if config.evaluation.eval_lengths:
                self._extrapolate(log)

    def _announce(self, log: RunLog) -> None:
        parameters = count_parameters(self.model, self.groups)
        c, groups = self.config, self.groups
        attend = self.model.attend
        log.line(
            f"{parameters:,} parameters, {c.model.pos_emb}, {c.training.precision}, "
            f"ZeRO-{c.parallel.zero_stage}, {groups.pipe_size} x {groups.data_size} x "
            f"{groups.model.size} {groups.device.type} (pipeline x data x tensor parallel)"
            + (f", {groups.context.size} share a sequence" if groups.context.size > 1 else "")
        )
        log.line(f"attention: {attend.name} ({attend.reason})")
        log.line(
            f"{self.data.identity['tokens']:,} tokens in "
            f"{self.data.identity['documents']:,} documents"
        )
        log.line(self.start.text)
        if self.progress.step >= c.training.train_iters > 0:
            log.line(f"step {self.progress.step} of {c.training.train_iters}: nothing to train")
        evaluates_another = c.training.train_iters == 0 and (self.run_dir / "config.yml").exists()
        if groups.is_main and not evaluates_another:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            temporary = self.run_dir / ".config.yml.unfinished"
            temporary.write_text(c.to_yaml())
            temporary.replace(self.run_dir / "config.yml")

    def _held_out_loss(self, name: str, evaluations_before: int) -> float | None:
        """Loss on `valid` or `test` after that many earlier evaluations; None without such text."""
        c = self.config
        loader = self.data.held_out(name, evaluations_before=evaluations_before)
        if loader is None:
            return None
        count = c.training.eval_iters * c.batch.gradient_accumulation_steps
        return validation_loss(self.engine, loader, count, self.groups)

    def _train(self, log: RunLog) -> None:
        c = self.config
        loader = self.data.training(
            index_samples=self.progress.train_samples, consumed=self.progress.consumed_samples
        )
        if loader is None:
            raise ShardError(
                f"split {c.data.split!r} leaves no document to train on; give the first part more"
            )
        pos, theta = self.model.pos, self.model.theta

        def validate(step: int) -> float | None:
            if not c.training.eval_iters:
                return None
            return self._held_out_loss("valid", step // c.training.eval_interval - 1)

        def save(step: int) -> None:
            self.progress = Progress(step, loader.consumed_samples, self.progress.train_samples)
            if c.checkpoint.save:
                start = time.monotonic()
                folder = checkpoint.save(
                    self.engine,
                    self.groups,
                    Path(c.checkpoint.save),
                    self.progress,
                    about={**self.about, "config": c.to_flat_dict()},
                    keep_last=c.checkpoint.keep_last_n_checkpoints,
                )
                seconds = time.monotonic() - start
                log.line(f"  saved {folder}, training waited {seconds:.2f} s")

        train_loop(
            self.engine,
            loader,
            LoopSettings(
                train_iters=c.training.train_iters,
                accumulation=c.batch.gradient_accumulation_steps,
                seq_length=c.model.seq_length,
                train_batch_size=c.batch.train_batch_size,
                log_interval=c.training.log_interval,
                eval_interval=c.training.eval_interval,
                eval_iters=c.training.eval_iters,
                save_interval=c.checkpoint.save_interval,
                extra_save_iters=tuple(c.checkpoint.extra_save_iters),
                exit_interval=c.training.exit_interval,
                skips_overflow=c.training.precision == "fp16",
                clamps_copy_only=c.model.published_numerics and c.training.precision != "fp32",
            ),
            self.groups,
            log,
            first_step=self.progress.step,
            theta=theta,
            theta_names=() if theta is None else tuple(p.name for p in pos.parameters),
            theta_bounds=None if theta is None else pos.bounds(),
            validate=validate,
            save=save,
        )

    def _final_losses(self, log: RunLog) -> None:
        t = self.config.training
        for name, before in (("valid", t.train_iters // t.eval_interval), ("test", 0)):
            value = self._held_out_loss(name, before)
            if value is not None:
                log.metrics(
                    t.train_iters,
                    {f"final/{name}_loss": value},
                    text=f"{name} loss after training: {value:.4f}",
                )

    def _evaluate(self, log: RunLog) -> None:
        """`train_iters: 0`: the losses that the published program prints, on its batches."""
        b, step = self.config.batch, self.progress.step
        wanted = self.config.training.eval_iters * b.gradient_accumulation_steps
        for name in ("valid", "test"):
            loader = self.data.held_out_at(name, iteration=step)
            count = 0 if loader is None else min(wanted, loader.batches_left)
            if count == 0:
                log.line(f"{name}: the split holds no batch to evaluate")
                continue
            first = loader.consumed_samples
            value = validation_loss(self.engine, loader, count, self.groups)
            short = f", all that are left of {wanted} batches" if count < wanted else ""
            sequences = count * loader.micro_batch * loader.dp_size
            text = (
                f"{name} loss at iteration {step}: {value:.6f} | perplexity "
                f"{math.exp(value):.4f} | {sequences} sequences of "
                f"{self.config.model.seq_length_val} tokens, from sample {first} on{short}"
            )
            values = {f"final/{name}_loss": value, f"final/{name}_ppl": math.exp(value)}
            log.metrics(step, values, text=text)

    def _extrapolate(self, log: RunLog) -> None:
        self.engine.eval()
        theta = self.model.theta
        if theta is not None:
            theta = all_heads(full_theta(self.engine, theta), self.groups).cpu()
        extrapolate(
            self.config,
            self.groups,
            loss_fn=losses_of(self.engine, self.groups),
            pos=self.model.pos,
            theta_HN=theta,
            shards=self.data.shards,
            splits=self.data.splits,
            tokenizer=self.data.tokenizer,
            run_dir=self.run_dir,
            lengths=self.config.evaluation.eval_lengths,
            say=log.line,
        )

    def _wandb_options(self) -> dict[str, Any]:
        logging = self.config.logging
        return {
            key: getattr(logging, key)
            for key in ("wandb_project", "wandb_team", "wandb_group", "wandb_host", "wandb_mode")
        }
