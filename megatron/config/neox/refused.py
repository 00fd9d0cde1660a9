"""List the GPT-NeoX keys that are refused, because they would change what a run computes or stores.

Each key has a reason, a text that tells the user what to write instead, and a test for harmless
values. A harmless value asks for what happens anyway, such as `onnx_safe: false`. It is accepted
without a note to the user. A key inside a mapping is written with a dot, as MAPPING.KEY. If the
value of a listed key is a mapping, the mapping is refused as a whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.fields import show
from megatron.config.neox.no_effect import NO_EFFECT, REPORTS
from megatron.config.reader import scalar

Flat = Mapping[str, Any]
"""The type of a mapping from dotted keys to the values of all settings."""
_Test = Callable[[Any, Flat], bool]
_LEAVE = "leave it out"


@dataclass(frozen=True)
class Refusal:
    """The reason why a config key is refused, and a test for values that are accepted nevertheless.

    Attributes:
        reason: The reason why the key is refused.
        instead: A text that tells the user what to write instead.
        harmless: A function of (value of the key, all settings). It returns whether the value is
            accepted.
    """

    # A harmless value is accepted because it has no effect.

    reason: str
    instead: str
    harmless: _Test

    def text(self, value: Any) -> str:
        """Return the error text for a refused value: the reason, and what to write instead."""
        instead = self.instead if self.instead == _LEAVE else f"write {self.instead} instead"
        return f"{show(value)} is refused: {self.reason}; {instead}"


def _equals(*values: Any) -> _Test:
    return lambda value, _: any(type(value) is type(v) and value == v for v in values)


_never = _equals()
_MMAP: _Test = lambda value, _: str(value).lower() in ("mmap", "infer")  # noqa: E731


def _same_as(key: str) -> _Test:
    return lambda value, flat: value == flat.get(key)


def _disabled(value: Any, flat: Flat) -> bool:
    """Return whether a mapping of DeepSpeed's settings is empty or contains `enabled: false`."""
    return value == {} or (isinstance(value, Mapping) and value.get("enabled") is False)


REFUSED: dict[str, Refusal] = {}
_FALSE = _equals(False)


def _refuse(keys: str, reason: str, instead: str = "false", harmless: _Test | None = None) -> None:
    """Add a `Refusal` for each key in `keys`.

    Args:
        keys: The config keys, separated by spaces.
        reason: The reason why the keys are refused.
        instead: A text that tells the user what to write instead.
        harmless: A function that returns whether a value is accepted. By default, the only accepted
            value is the last word of `instead`.
    """
    harmless = harmless or _equals(scalar(instead.rpartition(" ")[2]))
    REFUSED.update(dict.fromkeys(keys.split(), Refusal(reason, instead, harmless)))


_refuse(
    " ".join(
        f"{sign}{part}{kind}_data_paths"
        for sign in ("", "pos_", "neg_")
        for part in ("train", "valid", "test")
        for kind in ("", "_label", "_reward")
        if sign + kind not in ("", "pos__reward", "neg__reward")
    ),
    "only next-token prediction on one corpus is built",
    "train_data_paths",
    _equals([]),
)
_refuse("train_impl", "only next-token prediction is built", "train_impl: normal")
_refuse("dataset_impl", "only the gpt2 dataset is built", "dataset_impl: gpt2")
_refuse("pack_impl", "documents are always packed", "pack_impl: packed")
_refuse("data_impl", "only the mmap format is read", "data_impl: mmap", _MMAP)
_refuse("apply_query_key_layer_scaling", "not built yet")
_refuse("optimizer.params.amsgrad prescale_gradients sparse_gradients", "not built")
_refuse("soft_prompt_tuning", "soft prompts are not built", _LEAVE, _disabled)

_refuse("onnx_safe", "that key's gelu divides by 1.41421, ours by sqrt(2)")
_refuse(
    "num_unique_layers", "layers share only the positional kernel", _LEAVE, _same_as("num_layers")
)
_refuse("fp16_lm_cross_entropy", "the loss is computed in fp32")
_refuse(
    "te_columnparallel te_rowparallel te_layernorm_mlp te_mha te_fp8_mha",
    "Transformer Engine is not used",
)
_refuse("mlp_type", "activation says if there is a gate", "activation: swiglu", _equals("regular"))
_refuse("moe_num_experts", "mixtures of experts are not built", "moe_num_experts: 1")
_refuse("use_mup coord_check save_base_shapes", "muP is not built")
_refuse("serve_model_weights", "weights are not served")

_refuse("use_bnb_optimizer", "8-bit optimizer states are not built")
_refuse(
    "optimizer.params.weight_decay", "GPT-NeoX reads it at the top", "weight_decay: 0.1", _never
)
_refuse(
    "optimizer.params.bias_correction optimizer.params.adam_w_mode",
    "adam has bias correction and decoupled decay, as the published optimizer",
    "true",
)
_refuse(
    "scheduler",
    "the learning rate follows lr_decay_style",
    "lr_decay_style and warmup",
    _equals({}),
)
_refuse("warmup_iters", "warm-up is a fraction", "warmup: warmup_iters / lr_decay_iters", _never)
_refuse("decay_lr_to", "not a GPT-NeoX key", "min_lr: decay_lr_to x lr", _never)
_refuse("gradient_predivide_factor", "not built", "1.0", _equals(1, 1.0))
_refuse(
    "loss_scale loss_scale_window hysteresis",
    "DeepSpeed reads it inside fp16",
    "fp16: {enabled: true, KEY: ...}",
    _never,
)
_refuse("min_scale", "DeepSpeed reads it inside fp16", "fp16: {min_loss_scale: ...}", _never)
_refuse(
    "amp autotuning elasticity data_efficiency compression_training checkpoint",
    "this feature of DeepSpeed is not used",
    _LEAVE,
    _disabled,
)
_refuse("autotuning_run", "autotuning is not used", _LEAVE, _never)
_refuse(
    "deepspeed_extra_args",
    "no setting is passed to DeepSpeed unchecked",
    "the GPT-NeoX key of each setting",
    lambda value, _: isinstance(value, Mapping) and {NO_EFFECT.get(x) for x in value} <= {REPORTS},
)
_refuse("checkpoint_scale", "checkpoints are saved at a fixed interval", "linear")
_refuse("s3_path", "checkpoints are not copied to S3", "save: DIRECTORY", _never)
_refuse(
    "iteration", "the file `latest` in the folder names the checkpoint", "load: DIRECTORY", _never
)
_refuse("no_load_optim no_load_rng", "partial loading is not built", "finetune: true", _FALSE)
_refuse("no_save_optim no_save_rng", "a checkpoint is always complete")
_refuse("train_epochs", "training is counted in iterations", "train_iters: N", _never)
_refuse("do_train do_valid do_test", "follows from train_iters and split", _LEAVE, _never)
_COMPUTED = "GPT-NeoX computes it from the other key and ignores this one"
for _key, _written in {
    "lr": "optimizer: {params: {lr: ...}}",
    "optimizer_type": "optimizer: {type: ...}",
    "zero_stage": "zero_optimization: {stage: ...}",
    "zero_reduce_scatter": "zero_optimization: {reduce_scatter: ...}",
    "zero_contiguous_gradients": "zero_optimization: {contiguous_gradients: ...}",
    "zero_reduce_bucket_size": "zero_optimization: {reduce_bucket_size: ...}",
    "zero_allgather_bucket_size": "zero_optimization: {allgather_bucket_size: ...}",
    "batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
    "dynamic_loss_scale": "fp16: {loss_scale: 0}",
    "world_size": "the number of processes to torchrun",
    "is_pipe_parallel": "pipe_parallel_size",
}.items():
    _refuse(_key, _COMPUTED, _written, _same_as(_written))
