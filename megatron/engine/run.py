"""A whole training job, from a config to a trained, saved and evaluated model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.data import ShardError
from megatron.engine import checkpoint, distributed
from megatron.engine.build import build_model, identity_of
from megatron.engine.checkpoint import Progress
from megatron.engine.extrapolate import extrapolate
from megatron.engine.job_data import JobData
from megatron.engine.job_engine import job_engine
from megatron.engine.log import RunLog
from megatron.engine.loop import LoopSettings, train_loop, validation_loss
from megatron.engine.optim import full_theta, own_hyperparameters
from megatron.parallel import Groups

UNSAVED = Path("runs/unsaved")
"""Where reports go when the config names no `save` folder."""


def train(config: Config, *, verbose: bool = False) -> None:
    """Train (resuming where `load` allows), save, and evaluate as the config says.

    Raises:
        ConfigError, ShardError, CheckpointError, DivergedError: with what to do in the text.
    """
    groups = distributed.start(backend=config.parallel.distributed_backend, verbose=verbose)
    try:
        Job(config, groups).run()
    finally:
        distributed.stop()


class Job:
    """The parts of one training job, built in the order in which data flows."""

    def __init__(self, config: Config, groups: Groups):
        self.config, self.groups = config, groups
        save = config.checkpoint.save
        self.run_dir = Path(save) if save else UNSAVED
        self.data = JobData(config, groups)
        self.layout = {
            "data_parallel_size": groups.data_size,
            "zero_stage": config.parallel.zero_stage,
            "precision": config.training.precision,
            "optimizer": config.optimizer.type,
            "weight_decay_positional": config.optimizer.weight_decay_positional,
        }
        torch.manual_seed(config.training.seed + groups.rank)  # dropout: each rank its own stream
        vocab_size = self.data.tokenizer.vocab_size
        self.model = build_model(config, vocab_size, device_type=groups.device.type)
        self.about = {
            "model": identity_of(config, self.model, self.data.tokenizer),
            "data": self.data.identity,
            "layout": self.layout,
        }
        source, resumes, self.origin = self._source()
        if source and not resumes:  # before the engine copies the weights into its masters
            checkpoint.require_same(*source, {"model": self.about["model"]})
            checkpoint.load_weights(self.model, *source)
        self.engine, self.schedule = job_engine(config, self.model, groups)
        self.progress = Progress(0, 0, self.data.wanted["train"])
        if source and resumes:
            checkpoint.require_same(*source, self.about)
            with own_hyperparameters(self.schedule):
                self.progress = checkpoint.restore(self.engine, groups, *source)

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
            append=step > 0,
            last_step=step,
        ) as log:
            self._announce(log)
            if step < config.training.train_iters:
                self._train(log)
            if config.training.train_iters > 0 and config.training.eval_iters > 0:
                self._final_losses(log)
            if config.evaluation.eval_lengths:
                self._extrapolate(log)

    def _source(self) -> tuple[tuple[Path, str] | None, bool, str]:
        """(checkpoint folder and tag or None, whether to resume from it, a line that says why).

        Without resuming, the source gives its weights alone (`finetune`). A `save` folder with
        another run's checkpoints is refused: they would be replaced one by one.
        """
        c = self.config.checkpoint
        save, load = (Path(name) if name else None for name in (c.save, c.load))
        if save and self.groups.is_main:
            left = checkpoint.remove_unfinished(save)
            if left:
                print(f"removed what a killed run left half written: {', '.join(left)}")
        self.groups.barrier()
        saved = checkpoint.newest(save) if save else None
        if saved and c.finetune:
            return (save, saved), True, f"resuming the finetuning from {save / saved}"
        loaded = checkpoint.newest(load) if load else None
        if saved and (not loaded or save.resolve() != load.resolve()):
            raise checkpoint.CheckpointError(
                f"save: {save} holds a checkpoint already ({saved}), and this run does not "
                f"continue it; write `load: {save}` to continue, or another `save` for a new run"
            )
        if not load:
            return None, False, "starting fresh: no `load` in the config"
        if not loaded:
            return None, False, f"starting fresh: {load} holds no checkpoint"
        if c.finetune:
            text = f"starting at step 0 from the weights of {load / loaded} (finetune)"
            return (load, loaded), False, text
        return (load, loaded), True, f"resuming from {load / loaded}"

    def _announce(self, log: RunLog) -> None:
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())
        c, groups = self.config, self.groups
        attend = self.model.layers[0].attention.attend
        log.line(
            f"{parameters:,} parameters, {c.model.pos_emb}, {c.training.precision}, "
            f"ZeRO-{c.parallel.zero_stage}, {groups.data_size} x {groups.device.type}"
        )
        log.line(f"attention: {attend.name} ({attend.reason})")
        log.line(
            f"{self.data.identity['tokens']:,} tokens in "
            f"{self.data.identity['documents']:,} documents"
        )
        log.line(self.origin)
        if self.progress.step >= c.training.train_iters > 0:
            log.line(f"step {self.progress.step} of {c.training.train_iters}: nothing to train")
        if groups.is_main:
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
                folder = checkpoint.save(
                    self.engine,
                    self.groups,
                    Path(c.checkpoint.save),
                    self.progress,
                    about={**self.about, "config": c.to_flat_dict()},
                    keep_last=c.checkpoint.keep_last_n_checkpoints,
                )
                log.line(f"  saved {folder}")

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

    def _extrapolate(self, log: RunLog) -> None:
        self.engine.eval()
        theta = self.model.theta
        extrapolate(
            self.config,
            self.groups,
            loss_fn=self.engine,
            pos=self.model.pos,
            theta_HN=full_theta(self.engine, theta).cpu() if theta is not None else None,
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
