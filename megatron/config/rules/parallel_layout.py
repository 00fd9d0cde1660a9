"""Check that the parallel layout fits the model. If it does not fit, describe the problem.

A degree of parallelism must divide the dimension that it splits, for example the number of heads.
Some combinations, such as pipeline stages with ZeRO-3, are refused because DeepSpeed cannot run
them.
"""

import math
from collections.abc import Iterator

from megatron.config.mlp_width import inner_width
from megatron.config.rules.relation import Found, Values, relation

_DEGREES = ("pipe_parallel_size", "model_parallel_size", "context_parallel_size")


def factors(values: Values) -> str:
    """Return the degrees of parallelism as the text of a product, for error messages.

    For example, the text is `pipe_parallel_size 1 x model_parallel_size 2`.
    """
    # Context parallelism is included only if its degree is above 1.
    named = [f"{name} {values[name]}" for name in _DEGREES]
    return " x ".join(named if values["context_parallel_size"] > 1 else named[:2])


def derive_data_parallel_size(values: Values) -> Iterator[Found]:
    """Compute `data_parallel_size`, and set it in `values`.

    If that is impossible, yield the problem as (field name, error message).
    """
    # The product of the other degrees of parallelism must divide the number of processes.
    values.pop("data_parallel_size", None)  # the default
    if any(name not in values for name in _DEGREES):
        return
    world, degrees = values["world_size"], [values[name] for name in _DEGREES]
    group = math.prod(degrees)
    if world % group == 0:
        values["data_parallel_size"] = world // group
        return
    key = next(name for name in _DEGREES if values[name] > 1)
    text = f"{world} process(es) cannot form groups of {factors(values)} = {group}"
    write = f"start a multiple of {group}, e.g. torchrun --nproc-per-node {group} train.py ..."
    yield key, f"{text}; {write}"


@relation("pipe_parallel_size", "num_layers")
def _stages(stages: int, layers: int) -> Found | None:
    if stages > layers:
        text = f"{stages} stages are more than num_layers {layers}, and each needs a layer"
        return "pipe_parallel_size", f"{text}; write at most {layers}"


@relation("pipe_parallel_size", "zero_stage")
def _zero_with_pipeline(stages: int, zero: int) -> Found | None:
    if stages > 1 and zero != 1:
        why = {
            0: "without ZeRO, DeepSpeed clips the gradients of each stage by themselves",
            2: "ZeRO-2 shards gradients to which a pipeline still adds",
            3: "ZeRO-3 shards parameters that a pipeline has already divided into stages",
        }[zero]
        text = f"{zero} with pipe_parallel_size {stages}: {why}; write stage: 1, or "
        needs = "(with model_parallel_size, if the model needs several devices)"
        return "zero_stage", f"{text}pipe_parallel_size: 1 {needs}"


@relation("output_layer_parallelism", "no_weight_tying", "hidden_size", "model_parallel_size")
def _row_output(kind: str, untied: bool, hidden: int, ranks: int) -> Found | None:
    if kind == "row" and untied and hidden % ranks:
        text = f"row divides hidden_size {hidden} among model_parallel_size {ranks}"
        return "output_layer_parallelism", f"{text}; write column"


@relation("model_parallel_size", "num_attention_heads")
def _heads(ranks: int, heads: int) -> Found | None:
    if heads % ranks:
        text = f"{ranks} does not divide num_attention_heads {heads}"
        return "model_parallel_size", f"{text}; write a divisor of {heads}"


@relation("model_parallel_size", "activation", "intermediate_size", "mlp_multiple_of")
def _mlp_width(ranks: int, activation: str, intermediate: int, multiple: int) -> Found | None:
    width = inner_width(activation, intermediate, multiple)
    if width % ranks:
        text = f"{ranks} does not divide the inner width {width} of the MLP ({activation})"
        return "model_parallel_size", f"{text}; write mlp_multiple_of: {math.lcm(multiple, ranks)}"


@relation("num_kv_heads", "num_attention_heads", "model_parallel_size")
def _key_heads(key_heads: int, heads: int, ranks: int) -> Found | None:
    if heads % key_heads:
        text = f"{key_heads} does not divide num_attention_heads {heads}"
        return "num_kv_heads", f"{text}; write a divisor of {heads}"
    if key_heads % ranks and heads % ranks == 0:
        text = f"model_parallel_size {ranks} does not divide {key_heads}, and the weights of a key "
        text += "head are not shared by several processes; write num_kv_heads: "
        text += f"{math.lcm(key_heads, ranks)}, or a smaller model_parallel_size"
        return "num_kv_heads", text


@relation(*_DEGREES, "num_attention_heads")
def _context(stages: int, tensor: int, context: int, heads: int) -> Found | None:
    if context == 1:
        return None
    if stages > 1:
        text = f"{context} with pipe_parallel_size {stages}: pipeline stages need the full sequence"
        return "context_parallel_size", f"{text}; write 1 for one of the two"
    if heads % (context * tensor):
        text = f"{context} x model_parallel_size {tensor} does not divide num_attention_heads"
        return "context_parallel_size", f"{text} {heads}; write a product that divides {heads}"


@relation(
    "sequence_parallel", "context_parallel_size", "model_parallel_size", "seq_length", "curriculum"
)
def _sequence(
    sequence_parallel: bool, context: int, tensor: int, whole: int, stages: tuple
) -> Found | None:
    shards = context * (tensor if sequence_parallel else 1)
    lengths = [("seq_length", whole), *(("curriculum", length) for _, length in stages)]
    name, length = next((each for each in lengths if each[1] % shards), ("", 0))
    if name:
        how = f"context_parallel_size {context}"
        if sequence_parallel:
            how += f" x model_parallel_size {tensor} (sequence_parallel)"
        text = f"{length} cannot be split into {how} = {shards} equal shards"
        return name, f"{text}; write e.g. {-(-length // shards) * shards}"


@relation("type", "model_parallel_size", "zero_stage")
def _muon(kind: str, ranks: int, stage: int) -> Found | None:
    if kind != "muon" or (ranks == 1 and stage < 2):
        return None
    what, write = f"model_parallel_size {ranks}", "model_parallel_size: 1"
    if ranks == 1:
        what, write = f"ZeRO-{stage}", "zero_optimization: {stage: 1}"
    text = f"muon needs whole matrices, and {what} divides them among processes"
    return "type", f"{text}; write {write}, or type: adam"


@relation("pipe_parallel_size", "no_weight_tying", "precision", "grad_accum_dtype")
def _tied_gradients(stages: int, untied: bool, precision: str, dtype: str) -> Found | None:
    """DeepSpeed adds the tied gradients of two stages only where it finds them in `grad`."""
    if stages == 1 or untied or dtype == precision or (precision, dtype) == ("bf16", "fp32"):
        return None
    text = f"{dtype} with {precision}, pipeline stages and tied embeddings is not summed right"
    return "grad_accum_dtype", f"{text}; leave it out, or write no_weight_tying: true"


@relation("zero_stage", "precision", "grad_accum_dtype")
def _accumulation(stage: int, precision: str, dtype: str) -> Found | None:
    if stage == 0 and dtype != precision:
        why = f"DeepSpeed's stage 0 accumulates in {precision}"
        text = f"{dtype} with {precision} needs ZeRO: {why}"
        return "grad_accum_dtype", f"{text}; write zero_optimization: {{stage: 1}}, or leave it out"
