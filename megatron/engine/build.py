"""Build what a config describes: the tokenizer, and the `Plan` from which `GPT` builds the model.

The packages of the model, of attention and of the data do not import `megatron.config`: their
arguments are plain values. This module reads the values from the config.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from megatron.attention import AttentionFn, cache_launches, choose
from megatron.config import Config, ConfigError
from megatron.config.builtin import task_name
from megatron.config.choices import terms_of
from megatron.config.errors import Mark, Problem
from megatron.config.per_layer import layers_of, values_of
from megatron.config.sections.model import ModelConfig
from megatron.data.tasks.base import Task
from megatron.data.tasks.registry import build_task
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.model_shape import DTYPES, numerics_of, shape_of
from megatron.model import Documents, LayerAttention, Plan
from megatron.numerics import Numerics
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.positional import PerLayer, PositionalEmbedding, PositionalError
from megatron.positional import load as load_positional
from megatron.suggest import did_you_mean


def task_of(config: Config) -> Task | None:
    """Build the length task that the config's `data_path` names.

    A length task, such as copying a sequence, generates its own examples, of any length. If
    `data_path` names text instead, return None.

    Raises:
        TaskError: An option in the config's `task_options` is unknown, or its value does not fit.
    """
    name = task_name(config.data.data_path)
    return build_task(name, config.data.task_options) if name else None


def counts_targets(config: Config) -> bool:
    """Return whether a step's loss is the mean over all targets of the step's batch.

    Otherwise, a step's loss is the mean of the losses of its micro-batches. Masked targets do not
    count in either case.
    """
    # Without masked targets, the two means are equal. A length task masks targets, too.
    masks = config.training.eod_mask_loss or task_name(config.data.data_path) is not None
    return config.training.calculate_per_token_loss and masks


def tokenizer_of(config: Config) -> Tokenizer:
    """Build the tokenizer that the config describes."""
    # A length task (see `task_of`) has a tokenizer of its own.
    data, task = config.data, task_of(config)
    if task is not None:
        return task.tokenizer
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def positional_of(config: Config, numerics: Numerics | None = None) -> PositionalEmbedding:
    """Build the positional embedding that the config describes.

    Args:
        numerics: The rules for rounding, such as the dtype of intermediate results. None means the
            rules of the config.
    """
    m = config.model
    loaded = {
        name: load_positional(
            name, numerics=numerics or numerics_of(config), **positional_options(m, name)
        )
        for name in values_of(m.pos_emb)
    }
    if not (m.theta_per_layer or isinstance(m.pos_emb, tuple)):
        return loaded[m.pos_emb]
    layers = [loaded[name] for name in layers_of(m.pos_emb, m.num_layers)]
    return PerLayer(layers, own_theta=m.theta_per_layer)


def positional_options(m: ModelConfig, name: str) -> dict[str, Any]:
    """Return the options of the positional embedding `name`, as keyword arguments.

    Args:
        m: The config section of the model. Its field `pos_emb_options` contains the options.
        name: The name of a positional embedding, such as `kerple_log`.

    Raises:
        PositionalError: `m.pos_emb_options` names an embedding that the model does not use, or the
            options of an embedding are not a mapping.
    """
    # `rpe` and `rotary` also get options from other config keys.
    terms = name.split(" + ")
    options = {term: m.pos_emb_options[term] for term in terms if term in m.pos_emb_options}
    if m.pos_emb == name and len(terms) == 1:  # the options themselves, without the name
        options = {name: m.pos_emb_options}
    elif unknown := sorted(set(m.pos_emb_options) - terms_of(m.pos_emb)):
        raise PositionalError(
            f"pos_emb_options has {unknown[0]}, which is no term of pos_emb: write the options of "
            f"each term under its name, such as {{{terms[0]}: {{...}}}}"
        )
    for term, values in options.items():
        if not isinstance(values, Mapping) or "numerics" in values:
            example = f"{{{term}: {{...}}}}, with options of {term}"
            raise PositionalError(f"pos_emb_options: {term} has {values!r}; write {example}")
    if "rpe" in terms:
        sizes = {"num_buckets": m.rpe_num_buckets, "max_distance": m.rpe_max_distance}
        options["rpe"] = {"scale": m.head_dim**0.5, **sizes, **options.get("rpe", {})}
    if "rotary" in terms:
        options["rotary"] = {**m.rope_scaling, **options.get("rotary", {})}
    return options.get(name, {}) if len(terms) == 1 else options


def attention_of(
    config: Config,
    pos: PositionalEmbedding,
    device_type: str,
    *,
    training: bool = True,
    masked: bool = False,
) -> AttentionFn:
    """Return the attention backend that the config's `attention_backend` selects.

    Args:
        pos: The positional embedding of one layer.
        training: Whether the model will be trained, which needs a backward pass.
        masked: Whether document boundaries or a sliding window limit the keys that a query sees.

    Raises:
        AttentionError: The selected backend does not support this model on this device.
    """
    # For the backend `fused`, this function also applies `cached_launches`, which switches cached
    # kernel launches on or off for the whole process.
    m = config.model
    chosen = choose(
        m.attention_backend, pos, device_type=device_type, dtype=DTYPES[config.training.precision],
        training=training, dropout=training and m.attention_dropout > 0.0, head_size=m.head_dim,
        masked=masked, decays=pos.has("gate"),
    )  # fmt: skip
    if chosen.name == "fused":
        cache_launches(config.training.cached_launches)
    return chosen


def describe_attention(attends: Sequence[AttentionFn]) -> list[str]:
    """Return lines for the log that name each layer's attention backend and the reason for it.

    Args:
        attends: The attention backend of each layer.
    """
    layers: dict[str, list[str]] = {}
    for index, attend in enumerate(attends):
        layers.setdefault(f"{attend.name} ({attend.reason})", []).append(str(index))
    if len(layers) == 1:
        return [f"attention: {text}" for text in layers]
    return [
        f"attention of layer{'s' * (len(these) > 1)} {', '.join(these)}: {text}"
        for text, these in layers.items()
    ]


def plan_of(
    config: Config,
    vocab_size: int,
    *,
    device_type: str,
    eod: int | None = None,
    training: bool = True,
    tp: TensorGroup = ALONE,
    cp: TensorGroup = ALONE,
) -> Plan:
    """Return the plan from which `GPT` builds the config's model.

    Args:
        vocab_size: The size of the tokenizer's vocabulary, before padding.
        device_type: The type of the device on which the model will run, "cuda" or "cpu".
        eod: The id of the tokenizer's end-of-document token. It is needed if the config sets
            `reset_attention_mask`.
        training: Whether the model will be trained. Training needs dropout and a backward pass.
        tp: The tensor-parallel group. This rank builds only its shard of the model.
        cp: The context-parallel group. Its ranks process different parts of each sequence.

    Raises:
        AttentionError: The attention backend does not support this model on this device.
    """
    pos, m = positional_of(config), config.model
    parts = [pos.of_layer(index) for index in range(m.num_layers)]
    windows = layers_of(m.sliding_window_width, m.num_layers)
    documents = None
    if m.reset_attention_mask:
        assert eod is not None
        documents = Documents(eod, m.reset_position_ids)
    elif m.random_positions:
        documents = Documents(None, drawn_from=m.random_positions)
    attends = cache(partial(attention_of, config, device_type=device_type, training=training))
    layers = []
    for (layer_pos, columns), window in zip(parts, windows, strict=True):
        attend = attends(layer_pos, masked=window is not None or m.reset_attention_mask)
        layers.append(LayerAttention(layer_pos, attend, columns, window))
    return Plan(
        shape=shape_of(config, vocab_size), pos=pos, attend=layers[0].attend,
        seed=config.training.seed, tp=tp, cp=cp, layers=tuple(layers), documents=documents,
        z_loss=config.training.z_loss, **theta_of(config, pos),
    )  # fmt: skip


def theta_of(config: Config, pos: PositionalEmbedding) -> dict[str, Any]:
    """Return the arguments of `Plan` that concern the learned parameters of `pos`.

    Raises:
        ConfigError: A value in the config does not fit `pos`.
    """
    # The keys name parameters of `pos` (theta) and start values within their bounds.
    found = list(_theta_problems(config, pos))
    if found:
        origins = config.origins
        places = [origins.get(key) or origins.get(key.partition(".")[0]) for key, _ in found]
        marks = [Mark(place) if place else None for place in places]
        raise ConfigError([Problem(m, *each) for m, each in zip(marks, found, strict=True)])
    frozen = config.optimizer.theta_frozen
    if isinstance(frozen, bool):
        frozen = tuple(p.name for p in pos.trained_parameters) if frozen else ()
    return {"theta_init": config.model.theta_init, "theta_frozen": frozen}


def _theta_problems(config: Config, pos: PositionalEmbedding) -> Iterator[tuple[str, str]]:
    """Yield (config key, problem) for each config value that does not fit `pos`."""
    # Only the keys about theta (the learned parameters of `pos`) and `eval_distance_scale`.
    init, frozen = config.model.theta_init, config.optimizer.theta_frozen
    try:
        if config.evaluation.eval_distance_scale != 1.0:
            pos.scaled(config.evaluation.eval_distance_scale)
    except PositionalError as error:
        yield "eval_distance_scale", f"{error}; drop this key"
    if config.model.random_positions and pos.has("distance"):
        text = f"{pos.name} computes distances from the order of the tokens, not from positions"
        yield "random_positions", f"{text}; drop this key, or write pos_emb: rotary"
    multiplied = config.optimizer.theta_lr_multiplier != 1.0
    if not pos.trained_parameters:
        given = {"theta_init": init, "theta_frozen": frozen, "theta_lr_multiplier": multiplied}
        given |= {"theta_per_layer": config.model.theta_per_layer}
        for key in (key for key, value in given.items() if value):
            yield key, f"pos_emb {pos.name} has no learned parameters; drop this key"
        return
    known = {parameter.name: parameter for parameter in pos.trained_parameters}
    named = {"theta_init": init, "theta_frozen": () if isinstance(frozen, bool) else frozen}
    for key, name in ((key, name) for key, names in named.items() for name in names):
        if name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(known)}"
            yield key, f"pos_emb {pos.name} has no parameter {name!r}; {hint.rstrip()}"
    for name, parameter in known.items():
        values = init.get(name, ())
        if parameter.shared and len(set(values if isinstance(values, tuple) else ())) > 1:
            yield f"theta_init.{name}", "all heads share this parameter; write one number"
        for value in values if isinstance(values, tuple) else [values]:
            if not parameter.low <= value <= parameter.high:
                text = f"{value} is outside of its bounds, {parameter.low} to {parameter.high}"
                yield f"theta_init.{name}", f"{text}; write a number between them"
