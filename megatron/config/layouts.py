"""Which layouts fit a model, and what each that does not is told.

Degrees of parallelism must divide what they cut; some pairs DeepSpeed cannot run.
"""

from __future__ import annotations

import math

Found = tuple[str, str]  # (attribute to blame, text)


def _stages(stages: int, layers: int) -> Found | None:
    if stages <= layers:
        return None
    text = f"{stages} stages cannot share out num_layers {layers}"
    return "pipe_parallel_size", f"{text}; write at most {layers}"


def _pipeline_stage(stages: int, zero: int) -> Found | None:
    if stages == 1 or zero == 1:
        return None
    why = {
        0: "without ZeRO, DeepSpeed clips each stage of a pipeline by itself",
        2: "ZeRO-2 cuts gradients that a pipeline still adds to",
        3: "ZeRO-3 cuts parameters that a pipeline already shares out",
    }[zero]
    return (
        "zero_stage",
        f"{zero} with pipe_parallel_size {stages}: {why}; write stage: 1, or "
        "pipe_parallel_size: 1 (with model_parallel_size, where a model needs several devices)",
    )


def _cut_heads(slices: int, heads: int) -> Found | None:
    if heads % slices == 0:
        return None
    text = f"{slices} cannot share num_attention_heads {heads} out evenly"
    return "model_parallel_size", f"{text}; write a divisor of {heads}"


def _cut_vocabulary(slices: int, multiple: int) -> Found | None:
    if multiple % slices == 0:
        return None
    return (
        "make_vocab_size_divisible_by",
        f"{multiple} is not a multiple of model_parallel_size {slices}, and the padded vocabulary "
        f"does not depend on the layout; write e.g. {math.lcm(multiple, slices)}",
    )


def _cut_gates(slices: int, activation: str, hidden: int) -> Found | None:
    inner = int(8 * hidden / 3)
    if activation != "geglu" or inner % slices == 0:
        return None
    return (
        "model_parallel_size",
        f"{slices} cannot cut geglu's inner width int(8/3 x hidden_size {hidden}) = {inner} "
        "evenly; write another hidden_size, or activation: gelu",
    )


def _accumulation(stage: int, precision: str, dtype: str) -> Found | None:
    if stage > 0 or dtype == precision:
        return None
    text = f"{dtype} with {precision} needs ZeRO: DeepSpeed's stage 0 accumulates in {precision}"
    return "grad_accum_dtype", f"{text}; write zero_optimization: {{stage: 1}}, or leave it out"


RELATIONS = (
    (("pipe_parallel_size", "num_layers"), _stages),
    (("pipe_parallel_size", "zero_stage"), _pipeline_stage),
    (("model_parallel_size", "num_attention_heads"), _cut_heads),
    (("model_parallel_size", "make_vocab_size_divisible_by"), _cut_vocabulary),
    (("model_parallel_size", "activation", "hidden_size"), _cut_gates),
    (("zero_stage", "precision", "grad_accum_dtype"), _accumulation),
)
"""(the values that a relation reads, the relation); `checks` asks them all."""
