"""Compute derived fields of a config, and check the rules that relate several fields.

The argument `values` of the functions maps field names to values. Fields with invalid values are
missing from `values`, because their problems are already reported. Rules that need a missing field
are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import builtin as _builtin  # noqa: F401  registers its checks
from megatron.config import layouts
from megatron.config import positional_checks as _positional_checks  # noqa: F401  registers them
from megatron.config import sizes as _sizes  # noqa: F401  registers its checks
from megatron.config.layouts import RELATIONS, Found, Values, relation

_SPLITS = ("train", "valid", "test")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive(values: Values, world_size: int) -> Iterator[Found]:
    """Fill in the derived fields of `values` in place, and yield each problem.

    A problem is (field name, error text). For example, the train batch size may not be a
    multiple of the data-parallel size.
    """
    same = {
        "num_kv_heads": "num_attention_heads",
        "seq_length_val": "seq_length",
        "max_position_embeddings": "seq_length",
    }
    for name, source in same.items():
        if values.get(name, 0) is None and source in values:
            values[name] = values[source]
    if values.get("intermediate_size", 0) is None and {"hidden_size", "activation"} <= set(values):
        factor = 8 if values["activation"] == "geglu" else 4
        values["intermediate_size"] = factor * values["hidden_size"]
    if values.get("momentum", 0) is None:
        values["momentum"] = 0.95 if values.get("type") == "muon" else 0.0
    if values.get("decay_iters", 0) is None and "train_iters" in values:
        values["decay_iters"] = max(1, values["train_iters"])
    if values.get("on_bad_loss") == "roll_back" and not values.get("save", "wrong"):
        yield "on_bad_loss", "roll_back needs checkpoints to go back to; write save: FOLDER"
    values["world_size"] = world_size
    values.pop("data_parallel_size", None)  # remove the default; computed on the next line
    yield from layouts.derive_data_parallel_size(values)
    if "data_parallel_size" in values:
        yield from _derive_batch(values)


def _derive_batch(values: Values) -> Iterator[Found]:
    """Complete the batch sizes, so that train = micro x accumulation x data-parallel size.

    The train or the micro size must be given. If the given values do not determine the number of
    accumulation steps, this number becomes 1. If the given values contradict the
    equation, yield a problem.
    """
    total, micro, steps = _BATCH
    if not all(name in values for name in _BATCH):
        return
    t, m, g = (values[name] for name in _BATCH)
    dp = values["data_parallel_size"]
    ranks = (
        f"data-parallel size {dp} (= {values['world_size']} process(es) / "
        f"({layouts.factors(values)}))"
    )
    if t is None and m is None:
        return  # reported as a missing required key
    if t is None:
        values[steps] = g or 1
        values[total] = m * values[steps] * dp
        return
    if m is not None and g is not None:
        if t != m * g * dp:
            yield (
                total,
                f"{t} is not {micro} {m} x {steps} {g} x {ranks}: {m} x {g} x {dp} = {m * g * dp}; "
                f"write {total}: {m * g * dp}, or leave one of the three out",
            )
        return
    known, free = (f"{micro} {m}", steps) if m else (f"{steps} {g or 1}", micro)
    per_step = (m or g or 1) * dp
    if t % per_step:
        below = t // per_step * per_step
        near = f"{below} or {below + per_step}" if below else str(per_step)
        yield (
            total,
            f"{t} = {known} x {free} x {ranks} leaves {free} = {t} / {per_step} = "
            f"{t / per_step:.4g}, not whole; write {total}: {near}",
        )
        return
    values[free] = t // per_step
    values[steps] = values[steps] or 1


def relations(values: Values) -> Iterator[Found]:
    """Check the rules between fields, and yield (field name, error text) for each violated rule."""
    for names, check in RELATIONS:
        if all(name in values and values[name] is not None for name in names):
            found = check(*(values[name] for name in names))
            if found:
                yield found


@relation("on_bad_loss", "zero_stage", "pipe_parallel_size", "precision")
def _bad_loss(action: str, zero: int, stages: int, precision: str) -> Found | None:
    if action != "skip":
        return None
    why = None
    if zero == 0:
        why = "skip with zero_optimization stage 0: the optimizer there cannot drop a gradient"
    elif stages > 1:
        why = f"skip with pipe_parallel_size {stages}: only the last stage knows the loss in time"
    elif precision == "fp16":
        why = "skip with fp16: its loss scale skips overflows already"
    return ("on_bad_loss", f"{why}; write roll_back or stop") if why else None


@relation("torch_compile", "zero_stage", "pipe_parallel_size", "model_parallel_size")
def _compiled(compiled: bool, zero: int, stages: int, tensor: int) -> Found | None:
    if not compiled or (zero < 3 and stages <= 1 and tensor <= 1):
        return None
    asked = "zero_optimization stage 3" if zero == 3 else "tensor or pipeline parallelism"
    return "torch_compile", f"true with {asked}: not supported; leave the key out"


MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes of `torch.compile` that use CUDA graphs."""


@relation("torch_compile_mode", "torch_compile", "context_parallel_size")
def _compile_mode(mode: str, compiled: bool, context: int) -> Found | None:
    if mode != "default" and not compiled:
        text = f"{mode} without torch_compile, so nothing is compiled"
        return "torch_compile_mode", f"{text}; write torch_compile: true too"
    if mode in MODES_WITH_CUDA_GRAPHS and context > 1:
        text = f"{mode} with context_parallel_size {context}: its CUDA graphs would have to hold "
        return "torch_compile_mode", f"{text}the messages between ranks; write default"


@relation("hidden_size", "num_attention_heads")
def _heads(hidden: int, heads: int) -> Found | None:
    if hidden % heads:
        near = max(1, round(hidden / heads)) * heads
        return (
            "hidden_size",
            f"{hidden} is not a multiple of num_attention_heads {heads} "
            f"({hidden} / {heads} = {hidden / heads:.4g}); write e.g. hidden_size: {near}",
        )


@relation("published_numerics", "norm", "rmsnorm_fusion")
def _published_norm(published: bool, norm: str, fused: bool) -> Found | None:
    if published and norm == "rmsnorm" and fused:
        text = "true with rmsnorm_fusion: the fused norm does not round as the published code"
        return "published_numerics", f"{text}; write rmsnorm_fusion: false"


@relation("min_lr", "lr")
def _min_lr(low: float, lr: float) -> Found | None:
    if low > lr:
        return "min_lr", f"{low} is above optimizer.params.lr {lr}; write at most {lr}"


@relation("type", "momentum")
def _momentum(kind: str, momentum: float) -> Found | None:
    if kind in ("adam", "fusedadam") and momentum != 0:
        text = f"{momentum}, but adam's momentum is betas[0]"
        return "momentum", f"{text}; drop momentum, or write type: sgd"
    if kind == "muon" and momentum >= 1:
        return "momentum", f"{momentum} never forgets a gradient; write a number below 1, e.g. 0.95"


@relation("eval_lengths", "eval_tokens")
def _eval_tokens(lengths: tuple[int, ...], tokens: int) -> Found | None:
    longest = max(lengths, default=0)
    if longest > tokens:
        text = f"{tokens} target tokens are fewer than the longest of eval_lengths, {longest}"
        return "eval_tokens", f"{text}; write at least {longest}"


@relation("eval_lengths", "eval_context_baseline")
def _context_baseline(lengths: tuple[int, ...], context: int) -> Found | None:
    if lengths and context >= max(lengths):
        text = f"{context} is not below the longest of eval_lengths, {max(lengths)}"
        return "eval_context_baseline", f"{text}; write a small context such as 16, or 0 for none"


@relation("eval_lengths", "eval_lengths_interval", "eval_interval")
def _lengths_interval(lengths: tuple[int, ...], interval: int, validation: int) -> Found | None:
    if interval and not lengths:
        return "eval_lengths_interval", f"{interval} without eval_lengths; write the lengths there"
    if interval % validation:
        text = (
            f"{interval} is no multiple of eval_interval {validation}, at which train.py validates"
        )
        return "eval_lengths_interval", f"{text}; write e.g. {validation}, or 0 for none"


@relation("profile", "memory_profiling", "profile_step_start", "profile_step_stop", "train_iters")
def _profile(trace: bool, memory: bool, first: int, last: int, steps: int) -> Found | None:
    if not (trace or memory) or steps == 0:
        return None
    if last < first:
        return "profile_step_stop", f"{last} is below profile_step_start {first}; write {first}"
    if first > steps:
        text = f"{first} is above train_iters {steps}, so no step is profiled"
        return "profile_step_start", f"{text}; write a smaller one"


@relation("flops_profiler_enabled", "pipe_parallel_size")
def _flops(enabled: bool, stages: int) -> Found | None:
    if enabled and stages > 1:
        text = "true with a pipeline, in which DeepSpeed begins the profile and never ends it"
        return "flops_profiler_enabled", f"{text}; write profile: true instead"


@relation("seed")
def _seed(seed: int) -> Found | None:
    if seed >= 2**32:
        return "seed", f"{seed} is above 2^32 - 1, the largest seed; write a smaller one"


@relation("warmup", "decay_style", "wsd_decay_ratio")
def _warmup(warmup: float, style: str, decay: float) -> Found | None:
    if style == "wsd" and warmup + decay > 1:
        return (
            "warmup",
            f"{warmup} + wsd_decay_ratio {decay} is above 1; write at most {1 - decay:g}",
        )
    if style != "wsd" and warmup > 0.5:
        return (
            "warmup",
            f"{warmup} of lr_decay_iters: the schedule also freezes for that fraction at its end, "
            "so above 0.5 it never reaches lr; write at most 0.5",
        )


@relation("attention_dropout", "hidden_dropout")
def _dropout(attention: float, hidden: float) -> Found | None:
    for name, value in (("attention_dropout", attention), ("hidden_dropout", hidden)):
        if value >= 1:
            return name, f"{value} drops every activation; write a probability below 1"
    return None


@relation("finetune", "save", "load")
def _finetune(finetune: bool, save: str, load: str) -> Found | None:
    if finetune and save.rstrip("/") == load.rstrip("/"):
        text = f"true with save and load both {load}: the new run would overwrite the checkpoints "
        text += "that it starts from"
        return "finetune", f"{text}; add -o save={save.rstrip('/')}-tuned"


@relation(*(f"{split}_data_{kind}" for kind in ("paths", "weights") for split in _SPLITS))
def _blended(*given: tuple) -> Found | None:
    """Check `*_data_paths` and `*_data_weights` by GPT-NeoX's rules.

    Paths must be given for all three splits (train, valid, test) or for none. If a split has
    weights, it must have one weight for each path.
    """
    paths, weights = given[:3], given[3:]
    if any(paths) and not all(paths):
        missing = [f"{split}_data_paths" for split, p in zip(_SPLITS, paths, strict=True) if not p]
        return "train_data_paths", f"needs {' and '.join(missing)} too; write all three"
    for split, p, w in zip(_SPLITS, paths, weights, strict=True):
        if w and len(w) != len(p):
            text = f"{len(w)} weights for {len(p)} paths; write one weight for each path"
            return f"{split}_data_weights", text
    return None


@relation("data_path", "train_data_paths")
def _one_way(path: str | tuple[str, ...], train: tuple[str, ...]) -> Found | None:
    if train:
        return "train_data_paths", "excludes data_path, but both are given; write one of the two"
