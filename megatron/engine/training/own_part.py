"""What this rank holds of the model: its slice, or its slice of its stage."""

from __future__ import annotations

from megatron.config import Config
from megatron.engine.build import attention_of, build_model, positional_of, shape_of
from megatron.engine.training.pipeline import Pipeline
from megatron.model import GPT
from megatron.parallel import Groups

Model = GPT | Pipeline


def build_own_part(config: Config, vocab_size: int, groups: Groups) -> Model:
    """What this rank holds of the model: its slice, or its slice of its stage."""
    if groups.pipe_size == 1:
        device = groups.device.type
        return build_model(
            config, vocab_size, device_type=device, tp=groups.model, cp=groups.context
        )
    pos = positional_of(config)
    attend = attention_of(config, pos, groups.device.type)
    return Pipeline(shape_of(config, vocab_size), pos, attend, config.training.seed, groups)


def count_parameters(model: Model, groups: Groups) -> int:
    """Numbers in the whole model, tied ones once."""
    own = sum(
        getattr(p, "ds_numel", p.numel()) * getattr(p, "cut_size", 1)
        for p in model.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
    )
    return sum(groups.gather_from_pipe(own))
