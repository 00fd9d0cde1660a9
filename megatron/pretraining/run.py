"""Run a full training job, from a config to a trained, saved and evaluated model."""

from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron import preemption
from megatron.config import Config
from megatron.config.describe import how_to_go_on
from megatron.cpu_settings import keep_memory
from megatron.data.errors import ShardError
from megatron.data.samples.loader import TrainLoader
from megatron.engine.checkpoint.async_save import Saver
from megatron.engine.checkpoint.choose_start import choose_start, usable
from megatron.engine.checkpoint.full_weights import describe
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.resume import restore
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.checkpoint.write import Destination
from megatron.engine.errors import BadLossError, CheckpointError, DivergedError
from megatron.engine.job.agreement import require_agreement, settings_of
from megatron.engine.job.join import joined_job
from megatron.engine.job.lease import Confirm, sole_writer, unleased
from megatron.engine.job_data import JobData
from megatron.engine.local_model import build_local_model
from megatron.engine.model_shape import identity_of
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.bad_loss import LossGuard
from megatron.engine.training.deepspeed_engine import job_engine, layout_of
from megatron.engine.training.hooks import Hook
from megatron.engine.training.loop import TrainingLoop
from megatron.engine.training.optimizer import keep_hyperparameters
from megatron.engine.training.pipeline_engine import loss_function
from megatron.engine.training.profiler import StepProfiler
from megatron.engine.training.speed import speed_of
from megatron.engine.training.step_log import StepLog
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.evaluation.by_length import draw_kernels, evaluate_lengths
from megatron.evaluation.held_out import log_final_losses, log_published_losses, validation
from megatron.evaluation.losses import MeasuredModel
from megatron.files import write_text
from megatron.model.embedding import scale_distances
from megatron.parallel.groups import Groups
from megatron.parallel.rng import derived_seed
from megatron.pretraining.fading import Fading
from megatron.pretraining.first_lines import first_lines
from megatron.pretraining.provenance import record_start
from megatron.pretraining.retrofit import retrofit_of
from megatron.pretraining.saving import Saving, require_writable, said_what_is_saved
from megatron.pretraining.validation import Validation, is_owed
from megatron.run_folder import RunFolder

UNSAVED = Path("runs/unsaved")
"""The folder for logs and plots of a run whose config names no `save` folder."""
MOST_ROLL_BACKS = 3
"""How many times a run may go back to the same checkpoint after a bad loss."""


def train(config: Config, *, verbose: bool = False, allow_fallback: bool = False) -> int:
    """Train the model that the config describes, save checkpoints, and evaluate the model.

    If the config's folder `load` contains a checkpoint, the run continues from this checkpoint.

    Args:
        verbose: Whether DeepSpeed prints its log messages.
        allow_fallback: Whether to start from the newest intact checkpoint if the newest one is
            damaged. If false, a damaged checkpoint is an error.

    Returns:
        The exit code: 0, or `preemption_exit_code` after a signal or time limit.

    Raises:
        ConfigError: A config key does not fit the positional embedding.
        StartError: This process cannot join the job, or the ranks' configs or data differ.
        DataError: The text cannot be read, or is too short.
        CheckpointError: A checkpoint cannot be read or written, or does not fit this run.
        DivergedError: The loss or a weight is not finite, or too many steps were bad.
    """
    folder = Path(config.checkpoint.save or UNSAVED)
    with joined_job(config.parallel, verbose=verbose) as groups, ExitStack() as stack:
        confirm = unleased
        if config.training.train_iters > 0 and groups.is_main:
            require_writable(folder)
            confirm = stack.enter_context(sole_writer(folder))
        Job(config, groups, allow_fallback=allow_fallback, confirm=confirm).run()
    return preemption.current.finish()


class Job:
    """One training job. `__init__` opens the text, builds the model and restores the checkpoint."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        *,
        allow_fallback: bool = False,
        confirm: Confirm = unleased,
    ):
        parallel = config.parallel
        groups = groups.divided(
            model_size=parallel.model_parallel_size,
            pipe_size=parallel.pipe_parallel_size,
            context_size=parallel.context_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
        )
        self.config, self.groups, self.confirm = config, groups, confirm
        self.run_dir = Path(config.checkpoint.save or UNSAVED)
        self._rolled_back: list[Saved] = []
        self._open_text()
        self._build_model()
        self._restore(allow_fallback)

    def _open_text(self) -> None:
        require_agreement(self.groups, "config", settings_of(self.config))
        self.data = JobData(self.config, self.groups)
        require_agreement(self.groups, "text", self.data.identity)

    def _build_model(self) -> None:
        config, groups, tokenizer = self.config, self.groups, self.data.tokenizer
        # Each data- or context-parallel rank and each stage draws dropout from its own stream.
        stream = groups.pipe_rank * groups.replica_size + groups.replica_rank
        torch.manual_seed(derived_seed(config.training.seed, f"dropout {stream}"))
        self.model = build_local_model(config, tokenizer.vocab_size, groups, tokenizer.eod)
        self.description = RunDescription(
            model=identity_of(config, self.model.shape, tokenizer),
            data=self.data.identity,
            layout=layout_of(config, groups),
            config=config.to_flat_dict(),
            **describe(self.model, groups),
        )

    def _restore(self, allow_fallback: bool) -> None:
        """Build the engine and load the weights and the state with which the job starts."""
        config, groups, samples = self.config, self.groups, self.data.wanted["train"]
        self.start = choose_start(config, groups, samples, allow_fallback=allow_fallback)
        self.description = replace(self.description, lineage=self.start.lineage)
        retrofit = retrofit_of(config, self.start, self.model.pos)
        change = retrofit.change if retrofit else None
        self.start.load_weights(self.model, self.description, groups, change)
        if retrofit:
            self.start.text += "\n" + retrofit.measure(self.model, self.data, groups)
        self.engine, self.schedule = job_engine(config, self.model, groups)
        self.theta = TrainedTheta(self.engine, self.model.theta_parts, self.model.pos, groups)
        self.progress = self.start.finish(self.engine, self.schedule, groups, self.description)

    def run(self) -> None:
        """Train up to the last step, then evaluate as the config asks."""
        c, step, trains = self.config, self.progress.step, self.config.training.train_iters > 0
        lines = first_lines(c, self.groups, self.model, self.data.text, self.start, step)
        with RunLog(
            self.run_dir, c.logging, is_main=self.groups.is_main, config=c.to_flat_dict(),
            card="\n".join(lines), append=step > 0 or not trains,
            last_step=step if trains else None, confirm=self.confirm,
        ) as log:  # fmt: skip
            for line in lines:
                log.line(line)
            self._write_config(log)
            with suppress(preemption.Leave):
                if step < c.training.train_iters or is_owed(self.progress.interval):
                    with said_what_is_saved(c.checkpoint.save):
                        self._train(log)
                if self.progress.step >= c.training.train_iters:
                    self._evaluate(log)  # only a finished run; one that left early is not
            if (end := preemption.current).left:
                log.line(f"{end.why}: left after step {self.progress.step}; {how_to_go_on(c)}")

    def _write_config(self, log: RunLog) -> None:
        """Write the config and the record of this start into the run folder."""
        # `config.yml` and `run.json`; a job that only evaluates another run writes none
        path = RunFolder(self.run_dir).config
        if self.config.training.train_iters > 0:
            record_start(self.run_dir, self.groups, self.description, self.start, log.line)
        if self.groups.is_main and (self.config.training.train_iters > 0 or not path.exists()):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_text(path, self.config.to_yaml())

    def _train(self, log: RunLog) -> None:
        """Train to the last step. After a bad loss, go back to a checkpoint or raise the error."""
        if self.groups.device.type == "cpu":
            keep_memory()
        saver, done = self._saver(log), False
        begins = self.progress.step == 0 and not self.start.resumes
        if saver and begins and 0 in self.config.checkpoint.extra_save_iters:
            saver.save(self.progress)
        while not done:
            left = self.config.training.train_iters - self.progress.step
            loader = self.data.training(
                index_samples=self.progress.train_samples,
                consumed=self.progress.consumed_samples,
                least=left * self.config.batch.train_batch_size,
            )
            if loader is None:
                raise ShardError(
                    f"split {self.config.data.split!r} leaves no document to train on; give the "
                    "first part more"
                )
            try:
                self._train_on(loader, saver, log)
                done = True
            except BadLossError as bad:
                self._roll_back(bad, loader, log)

    def _train_on(self, loader: TrainLoader, saver: Saver | None, log: RunLog) -> None:
        c, engine, groups, start = self.config, self.engine, self.groups, self.progress
        preemption.current.begin()
        speed = speed_of(c, self.model.shape, groups, self.data.document_lengths())
        fades = c.checkpoint.retrofit_anneal
        hooks: list[Hook] = [
            *([Fading(self.model, fades)] if fades else []),  # before a validation that is due
            LossGuard(engine, groups, c.training, log),
            StepLog(c, engine, groups, self.theta, speed, log),
            Validation(partial(self._validate, log), log),
        ]
        saving = Saving(saver, start, loader, hooks[:])
        hooks += [saving, StepProfiler(c.logging, self.run_dir, log)]
        counting = self.data.counting
        loop = TrainingLoop(c, engine, groups, self.theta, log, hooks, start.interval, counting)
        try:
            loop.run(loader, start.step)
        finally:
            self.progress = saving.progress

    def _roll_back(self, bad: BadLossError, loader: TrainLoader, log: RunLog) -> None:
        """Load the newest intact checkpoint, and skip the samples that were read since its step.

        Args:
            bad: The error that the training loop raised.

        Raises:
            BadLossError: `on_bad_loss` is not `roll_back`, or no checkpoint is intact.
            DivergedError: The run has gone back to this checkpoint MOST_ROLL_BACKS times.
        """
        c = self.config
        if not c.checkpoint.save or c.training.on_bad_loss != "roll_back":
            raise bad
        try:
            saved, damaged = usable(Path(c.checkpoint.save), self.groups, allow_fallback=True)
        except CheckpointError as error:
            raise BadLossError(f"{bad}; {error}") from error
        if saved is None:
            raise bad
        self._rolled_back.append(saved)
        count = self._rolled_back.count(saved)
        if count > MOST_ROLL_BACKS:
            raise DivergedError(f"went back to {saved.path} {MOST_ROLL_BACKS} times; {bad}")
        with keep_hyperparameters(self.schedule, self.engine.optimizer):
            there = restore(self.engine, self.groups, saved, self.description, saved.folder)
        consumed = loader.consumed_samples
        self.progress = replace(there, consumed_samples=consumed)
        log.go_back(there.step)
        log.line(
            f"{bad}\nback to {saved.path} ({count} of at most {MOST_ROLL_BACKS} times), passing "
            f"over the samples {there.consumed_samples} to {consumed - 1}"
            + (f" (passed over: {damaged})" if damaged else "")
        )

    def _validate(self, log: RunLog, step: int) -> dict[str, float]:
        """Run the validation after `step` and return its metrics; plot the distance kernels."""
        c, pos = self.config, self.model.pos
        found = validation(self.data, self.engine, step)
        if pos.has("distance"):
            theta_HN = self.theta.master_of_all_heads()  # by all ranks; their logging may differ
            if self.groups.is_main and (c.logging.tensorboard_dir or c.logging.use_wandb):
                files = draw_kernels(pos, theta_HN, c, self.run_dir, step, few=True)
                log.pictures(step, files)
        return found

    def _saver(self, log: RunLog) -> Saver | None:
        c = self.config.checkpoint
        if not c.save:
            return None
        to = Destination(Path(c.save), self.description, c.keep_last_n_checkpoints, self.confirm)
        return Saver(self.engine, self.groups, to, beside_training=c.async_save, say=log.line)

    def _evaluate(self, log: RunLog) -> None:
        c, step = self.config, self.progress.step
        if c.training.eval_iters > 0 and c.training.train_iters > 0:
            log_final_losses(self.data, self.engine, log, step)
        elif c.training.eval_iters > 0:
            log_published_losses(self.data, self.engine, log, step)
        if c.evaluation.eval_lengths:
            self._evaluate_lengths(log)

    def _evaluate_lengths(self, log: RunLog) -> None:
        self.engine.eval()
        scale_distances(self.model, self.config.evaluation.eval_distance_scale)
        loss_fn, theta = loss_function(self.engine, self.groups), self.theta.master_of_all_heads()
        about = self.data.tokenizer, theta, self.progress.step
        model = MeasuredModel(self.config, self.groups, loss_fn, self.model, *about)
        evaluate_lengths(model, self.data.text, self.run_dir, log.line)
        log.pictures(self.progress.step, self.run_dir.glob("*.png"))
