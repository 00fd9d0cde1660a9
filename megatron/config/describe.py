"""Format a config as the text that `train.py --check` prints, and tell the user how to resume."""

from collections.abc import Mapping
from typing import Any

from megatron.config.fields import key_of
from megatron.config.mlp_width import GATED
from megatron.config.schema import Config

HIGHEST_RATES = ((20e9, 1.5e-4), (1e9, 3e-4))
"""Numbers of parameters, and Adam's highest published learning rate of models at least so large.

They are those of LLaMA 65B and LLaMA 7B; GPT-NeoX-20B has 0.97e-4, Pythia 1.2e-4 to 3e-4.
"""


def doubts(config: Config) -> list[str]:
    """Return a list of warnings about the config.

    The list has one warning if the learning rate is unusually high for a model of this size.
    Otherwise it is empty.
    """
    size, adam = config.model.block_parameters, config.optimizer
    most = next((most for least, most in HIGHEST_RATES if size >= least), float("inf"))
    if not config.training.train_iters or "adam" not in adam.type or adam.lr <= 1.5 * most:
        return []
    return [
        f"warning: optimizer.params.lr {adam.lr:g} with weight_decay {adam.weight_decay:g} for a "
        f"model of {size / 1e9:.3g} billion parameters: published ones have at most {most:g} and "
        "0.01 to 0.1; is the training that of a smaller model? See configs/recipes"
    ]


def describe(config: Config) -> str:
    """Describe the config as text: each value with its origin, the derived values, and the notes.

    The origin of a value is the file and line that set it, the override that set it, `default`, or
    `derived`.
    """
    lines = ["configuration from " + (", ".join(config.sources) or "overrides only")]
    for title, section in config.sections():
        lines.append(f"\n{title}")
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            key = key_of(type(section), name)
            default = info.get_default(call_default_factory=True)
            origin = "default" if key and value == default else "derived"
            rows = {key or name: value}
            if isinstance(value, Mapping):
                rows = {f"{key}.{inner}": each for inner, each in value.items()}
            for row, each in rows.items():
                inner = f"{name}.{row.rpartition('.')[2]}"
                where = config.origins.get(inner) or config.origins.get(name, origin)
                lines.append(f"  {row:<46} {_show(each):<24} {where}")
    lines += ["\nderived", *(f"  {line}" for line in _derived(config))]
    if notes := [*config.notes, *doubts(config)]:
        lines += ["\nnotes", *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _derived(config: Config) -> list[str]:
    """Return one line of text for each derived quantity, such as the head size."""
    m, b, p, t = config.model, config.batch, config.parallel, config.training
    tokens = b.train_batch_size * m.seq_length
    context = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    heads = m.num_attention_heads
    width = f"intermediate_size {m.intermediate_size}" + " x 2/3 / 2" * (m.activation in GATED)
    if m.mlp_multiple_of > 1:
        width += f", rounded up to a multiple of {m.mlp_multiple_of}"
    lines = [
        f"data-parallel size {p.data_parallel_size} = {p.world_size} process(es) / "
        f"({p.pipe_parallel_size} pipe x {p.model_parallel_size} model{context})",
        f"train_batch_size {b.train_batch_size} = {b.train_micro_batch_size_per_gpu} micro x "
        f"{b.gradient_accumulation_steps} accumulation x {p.data_parallel_size} data-parallel",
        f"tokens a step {tokens:,} = {b.train_batch_size} x {m.seq_length}; "
        f"in all {tokens * t.train_iters:,}",
        f"head size {m.head_dim}"
        + f" = {m.hidden_size} / {m.num_attention_heads}" * (m.head_dim * heads == m.hidden_size),
        f"MLP inner width {m.inner_width} = {width}",
        f"warm-up {config.lr.warmup * config.lr.decay_iters:g} iterations = "
        f"{config.lr.warmup:g} x {config.lr.decay_iters}",
    ]
    if t.train_iters == 0:
        lines.append("train_iters is 0: nothing is trained, only evaluated")
    return lines


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)


def how_to_go_on(config: Config) -> str:
    """Return a text that tells the user how to continue a run that has ended early."""
    save, load = config.checkpoint.save, config.checkpoint.load
    if not save:
        return "nothing is saved, because the config names no folder `save`"
    if load:
        return "run the same command again to go on"
    return f"run the same command with `load: {save}` to go on"
