"""Replace the positional embeddings of a trained model at the start of a run (a retrofit).

For example, a run may start from a model with rotary embeddings, and add `kerple_log`. The class
`ChangedPositions` determines which weights the old and the new model share. This module reads the
old positional embeddings from the checkpoint, and compares the losses of the old and the new model
on the first samples of the run. One process of the job compares the unsharded models, so the result
is the same in every parallel layout.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import Config, ConfigError, load_config
from megatron.config.command_line import sharing_layout
from megatron.config.per_layer import layers_of
from megatron.config.sections.model import ModelConfig
from megatron.engine.build import plan_of, positional_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.resume import Start
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.job_data import JobData
from megatron.engine.local_model import Model, count_parameters
from megatron.engine.model_shape import DTYPES
from megatron.engine.training.batches import on_device
from megatron.model import GPT
from megatron.model.changed_positions import ChangedPositions
from megatron.parallel.groups import Groups
from megatron.parallel.loss import mean_loss
from megatron.positional import PositionalEmbedding
from megatron.positional import load as load_positional
from megatron.pretraining.fading import fade
from megatron.pretraining.fit_kernels import fit_added

POSITIONS = (
    "pos_emb", "pos_emb_options", "theta_per_layer", "rope_scaling", "rotary_pct",
    "rotary_emb_base", "rpe_num_buckets", "rpe_max_distance", "max_position_embeddings",
    "opt_pos_emb_offset", "sliding_window_width",
)  # fmt: skip
"""The config keys that say what a model does with positions."""
# Other names of these keys in `RunDescription.model`.
_RECORDED = {"rotary_base": "rotary_emb_base", "position_offset": "opt_pos_emb_offset"}
MOST_SAMPLES, MOST_PRODUCTS, MOST_ON_CPU = 16, 10**14, 10**12
"""The most samples on which the models are compared, and the most products on a GPU and a CPU."""


@dataclass(frozen=True)
class Retrofit:
    """A change of a model's positional embeddings at the start of fine-tuning.

    Attributes:
        config: The config of the run.
        source: The config of the run, but with the positional embeddings of the checkpoint.
        saved: The checkpoint from which the run starts.
        change: The old and the new positional embeddings.
    """

    config: Config
    source: Config
    saved: Saved
    change: ChangedPositions

    def measure(self, model: Model, data: JobData, groups: Groups) -> str:
        """Measure the loss before and after the change of embeddings, and return lines for the log.

        If the config sets `retrofit_init: fit`, this method also fits the parameters of added
        embeddings, and writes them into `model`. Every rank must call this method.

        Args:
            model: This rank's part of the new model.
            data: The text on which the losses are computed.

        Raises:
            PositionalError: This change of positional embeddings cannot be fitted.
        """
        tokens_NS = data.first_samples(min(self.config.batch.train_batch_size, MOST_SAMPLES))
        fitted, text, count = {}, "", count_parameters(model, groups)
        if tokens_NS is not None and groups.is_main:
            whole = (
                groups.model.size * groups.pipe_size == 1 and self.config.parallel.zero_stage < 3
            )
            device = groups.device if whole else torch.device("cpu")  # where a large model fits
            cost, slow = count * (tokens_NS.shape[1] - 1), device.type == "cpu"
            most = MOST_ON_CPU // cost if slow else max(1, MOST_PRODUCTS // cost)
            pair = data.counting.pair(on_device(tokens_NS, device))
            fitted, text = self._compare(*pair, data, most)
        fitted, text = groups.gather_from_job((fitted, text))[0]
        self.change.set_columns(dict(model.named_parameters()), fitted)
        return text

    @torch.no_grad()
    def _compare(
        self, inputs: Tensor, targets: Tensor, data: JobData, most: int
    ) -> tuple[dict[int, Tensor], str]:
        """Compare the old and the new model on some samples.

        Args:
            most: The maximum number of samples.

        Returns:
            (fitted parameters by index, lines for the log).
        """
        # The parameters are columns of theta, the learned parameters of the positional embeddings.
        # If `most` is 0 and the config does not ask for a fit, no model is built.
        fits, fitted, texts = self.config.checkpoint.retrofit_init == "fit", {}, []
        precision = DTYPES[self.config.training.precision]
        if not most and not fits:
            skipped = f"  loss not compared: it takes more than {MOST_ON_CPU:.0e} products on a CPU"
            return {}, "\n".join([*self._lines({}), skipped])
        for config, change in ((self.source, None), (self.config, self.change)):
            size, eod, kind = data.tokenizer.vocab_size, data.tokenizer.eod, inputs.device.type
            with_auto = config.model.model_copy(update={"attention_backend": "auto"})
            config = config.model_copy(update={"model": with_auto})
            model = GPT(plan_of(config, size, device_type=kind, eod=eod, training=False)).eval()
            load_weights(model, self.saved, change=change)
            model.to(device=inputs.device, dtype=None if fits else precision)
            if model.embedding.position_embeddings is not None:  # `learned` has so many positions
                rows = config.model.max_position_embeddings - config.model.opt_pos_emb_offset
                inputs, targets = inputs[:, :rows], targets[:, :rows]
            if change is None and fits:
                fitted = fit_added(model, self.change, inputs)
            if change is not None:
                change.set_columns(dict(model.named_parameters()), fitted)
                fade(model, float(config.checkpoint.retrofit_anneal > 0))
            model.to(precision)
            if change is None:
                inputs, targets = (x[: max(1, most)] for x in (inputs, targets))
            pairs = zip(inputs.split(1), targets.split(1), strict=True)
            losses = torch.cat([model(x, y).float() for x, y in pairs])
            texts.append(f"{mean_loss(losses, targets):.4f}")
        where = f"{len(inputs)} samples of {inputs.shape[1]} tokens"
        losses = f"{texts[0]} as the checkpoint was trained, {texts[1]} now"
        return fitted, "\n".join([*self._lines(fitted), f"  loss on the first {where}: {losses}"])

    def _lines(self, fitted: dict[int, Tensor]) -> list[str]:
        """Return lines for the log about the sliding window, the fading and the fitted values."""
        lines, anneal = [], self.config.checkpoint.retrofit_anneal
        windows = [each.model.sliding_window_width for each in (self.source, self.config)]
        if windows[0] != windows[1]:
            lines.append(f"  sliding_window_width: {windows[0]} -> {windows[1]}")
        if anneal:
            lines.append(f"  rotary fades over {anneal} steps")
        for n, value_H in fitted.items():
            values = ", ".join(f"{value:.3g}" for value in value_H.tolist())
            lines.append(f"  fitted {self.change.new.parameters[n].name}: {values}")
        return lines


def retrofit_of(config: Config, start: Start, new: PositionalEmbedding) -> Retrofit | None:
    """Return the change of positional embeddings from a checkpoint to a run.

    The result is None if the run resumes or does not fine-tune, if nothing changes, or if the
    checkpoint does not record its embeddings.

    Args:
        start: The starting point of the run.
        new: The positional embedding of the run's model.

    Raises:
        CheckpointError: A key of the config does not fit the change of embeddings.
    """
    # These are errors: the config sets `retrofit_anneal`, but there is no rotary embedding to fade;
    # the config changes `pos_emb` or `sliding_window_width` without setting the key; the run
    # resumes during the fading with another `retrofit_anneal`.
    saved, c, layers = start.saved, config.checkpoint, config.model.num_layers
    if saved is not None and start.resumes:
        was, now = saved.record.config.get("retrofit_anneal", 0), c.retrofit_anneal
        if was != now and saved.step < max(was, now):
            raise CheckpointError(
                f"{saved.path} was trained with retrofit_anneal: {was}, and the config says {now}; "
                f"write retrofit_anneal: {was}, or another `save` to start again"
            )
    if saved is None or not c.finetune or start.resumes:
        return None
    source = _source(config, saved)
    old = positional_of(source)
    rotary = load_positional("rotary")
    had = all(rotary in old.of_layer(layer)[0].terms for layer in range(layers))
    turns = {(each.model.rotary_pct, each.model.rotary_emb_base) for each in (source, config)}
    if c.retrofit_anneal and (not had or len(turns) > 1 or new.has("rotary")):
        raise CheckpointError(
            "retrofit_anneal fades a rotary embedding without rope_scaling that all layers of the "
            "loaded model have, with this config's rotary_pct and rotary_emb_base, and that "
            f"pos_emb drops: {old.name} -> {new.name} has none; leave it out"
        )
    windows = [layers_of(each.model.sliding_window_width, layers) for each in (source, config)]
    same = all(old.of_layer(layer) == new.of_layer(layer) for layer in range(layers))
    if same and windows[0] == windows[1]:
        return None
    differs = {"pos_emb": not same, "sliding_window_width": windows[0] != windows[1]}
    for key in differs:
        if differs[key] and key not in config.origins:
            raise CheckpointError(
                f"{saved.path} was trained with {key}: {getattr(source.model, key)}, and the "
                f"config names no {key}; write this one, or the one that the model should have "
                "from now on"
            )
    gentle, length = c.retrofit_init != "drawn", config.model.seq_length
    change = ChangedPositions(old, new, layers, length, gentle, tuple(config.model.theta_init))
    return Retrofit(config, source, saved, change)


def _source(config: Config, saved: Saved) -> Config:
    """Return `config` with the positional settings that the checkpoint records.

    If the checkpoint records no positional settings, return `config` unchanged.
    """
    recorded = {}
    if saved.kind != "published":
        known = saved.record.config | saved.record.model
        recorded = {_RECORDED.get(key, key): value for key, value in known.items()}
    if not recorded and (files := sorted((saved.path / "configs").glob("*.yml"))):  # gpt-neox's
        with suppress(ConfigError):
            recorded = load_config(files, sharing_layout(1)).model.model_dump()
    if "pos_emb" not in recorded:
        return config
    optional = {"sliding_window_width": None}  # a record has no entry for None
    values = optional | {key: value for key, value in recorded.items() if key in POSITIONS}
    of_theta = {"theta_init": {}, "random_positions": 0}  # they may not fit the old positions
    sections = {
        "model": ModelConfig.model_validate(config.model.model_dump() | values | of_theta),
        "optimizer": config.optimizer.model_copy(
            update={"theta_frozen": False, "theta_lr_multiplier": 1.0}
        ),
        "evaluation": config.evaluation.model_copy(update={"eval_distance_scale": 1.0}),
    }
    return config.model_copy(update=sections)
