"""The resolved configuration: frozen sections with typed fields.

A field's NeoX key is its name unless `Key` gives another; `Key(None)` marks a field that is only
derived. Defaults are GPT-NeoX's; where the published KERPLE code and gpt-neox differ, a comment
names the one chosen. Lengths are tokens, iterations are optimizer steps, batch sizes are sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.config import flat
from megatron.config.choices import (
    Activation,
    AttentionBackend,
    DecayStyle,
    DistributedBackend,
    EvalSplit,
    Init,
    Norm,
    OptimizerType,
    PositionalName,
    Precision,
    Side,
    Tokenizer,
    WandbMode,
)
from megatron.config.fields import (
    Amount,
    Betas,
    Count,
    Degree,
    Epsilon,
    Flag,
    Frozen,
    FrozenDict,
    Key,
    Lengths,
    Positive,
    PositiveNumber,
    Probability,
    Split,
    Steps,
    Text,
    number,
    whole_number,
)
from megatron.config.paths import PathList, Paths, Weights

DERIVED: Any = None
"""Default of a field that `load_config` computes from other fields if it is not given."""


class Section(BaseModel):
    """A frozen group of fields that refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_kv_heads: Positive = DERIVED  # num_attention_heads
    seq_length: Positive
    seq_length_val: Positive = DERIVED  # seq_length
    max_position_embeddings: Positive = DERIVED  # seq_length; rows of `learned`
    pos_emb: PositionalName = "learned"
    pos_emb_options: Frozen = Field(default_factory=FrozenDict)
    rotary_pct: Annotated[float, BeforeValidator(number(0, 1, write="e.g. 0.25"))] = 1.0
    rotary_emb_base: PositiveNumber = 10000.0
    rpe_num_buckets: Positive = 32
    rpe_max_distance: Positive = 128
    opt_pos_emb_offset: Count = 0
    norm: Norm = "layernorm"
    layernorm_epsilon: Epsilon = 1e-5
    rms_norm_epsilon: Epsilon = 1e-8
    scalenorm_epsilon: Epsilon = 1e-8
    no_weight_tying: Flag = False
    gpt_j_residual: Flag = False
    activation: Activation = "gelu"
    bias_gelu_fusion: Flag = False  # true: tanh form of gelu, as published
    init_method: Init = "normal"
    output_layer_init_method: Init = "scaled_normal"
    init_method_std: PositiveNumber = 0.02
    attention_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    hidden_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    make_vocab_size_divisible_by: Positive = 128
    attention_backend: AttentionBackend = "auto"
    published_numerics: Flag = False  # own key: 16-bit rounding as in the published code
    checkpoint_activations: Flag = False
    output_layer_parallelism: Side = "column"  # the same function; published: row


class DataConfig(Section):
    # PREFIX of PREFIX.bin and .idx, a glob, a list of both, or builtin:python-stdlib
    data_path: Paths | None = None
    # Instead of data_path and split: each split's corpora, blended by weight (default: equal).
    train_data_paths: PathList = ()
    valid_data_paths: PathList = ()
    test_data_paths: PathList = ()
    train_data_weights: Weights = ()
    valid_data_weights: Weights = ()
    test_data_weights: Weights = ()
    weight_by_num_documents: Flag = False
    weighted_sampler_alpha: PositiveNumber = 1.0  # gpt-neox's; the published code's is 0.3
    data_dir: Text = "data"  # where builtin corpora are tokenised
    split: Split = "969, 30, 1"
    tokenizer_type: Tokenizer = "GPT2BPETokenizer"
    vocab_file: Text | None = None
    merge_file: Text | None = None


class BatchConfig(Section):
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp."""

    train_batch_size: Positive
    train_micro_batch_size_per_gpu: Positive
    gradient_accumulation_steps: Positive


class OptimizerConfig(Section):
    type: Annotated[OptimizerType, Key("optimizer.type")] = "adam"
    lr: Annotated[Amount, Key("optimizer.params.lr")]
    betas: Annotated[Betas, Key("optimizer.params.betas")] = (0.9, 0.999)
    eps: Annotated[Epsilon, Key("optimizer.params.eps")] = 1e-8
    momentum: Annotated[Amount, Key("optimizer.params.momentum")] = 0.0
    weight_decay: Amount = 0.01  # the published code's default; gpt-neox: 0.1
    weight_decay_positional: Flag = False  # own key: decay the kernel parameters too
    gradient_clipping: Amount = 1.0  # 0 = off; gpt-neox's default (published: off)


class LrConfig(Section):
    decay_style: Annotated[DecayStyle, Key("lr_decay_style")] = "linear"
    decay_iters: Annotated[Positive, Key("lr_decay_iters")] = DERIVED  # train_iters
    warmup: Annotated[
        float,
        BeforeValidator(number(0, 1, write="the fraction of lr_decay_iters to warm up, e.g. 0.01")),
    ] = 0.01
    min_lr: Amount = 0.0
    use_checkpoint_lr_scheduler: Flag = False


class TrainingConfig(Section):
    train_iters: Count  # 0: evaluate only
    eval_interval: Positive = 1000
    eval_iters: Count = 100
    log_interval: Positive = 100
    exit_interval: Positive | None = None
    seed: Count = 1234
    precision: Precision = "fp32"
    loss_scale: Annotated[Amount, Key("fp16.loss_scale")] = 0.0  # 0 = dynamic
    initial_scale_power: Annotated[Count, Key("fp16.initial_scale_power")] = 16
    loss_scale_window: Annotated[Positive, Key("fp16.loss_scale_window")] = 1000
    hysteresis: Annotated[Positive, Key("fp16.hysteresis")] = 2
    min_loss_scale: Annotated[Positive, Key("fp16.min_loss_scale")] = 1
    grad_accum_dtype: Annotated[Precision | None, Key("data_types.grad_accum_dtype")] = None


class ParallelConfig(Section):
    pipe_parallel_size: Degree = 1
    model_parallel_size: Degree = 1  # tensor parallelism
    sequence_parallel: Flag = False  # tensor-parallel ranks split positions between sharded layers
    context_parallel_size: Degree = 1  # Ulysses: ranks that split one sequence's positions
    zero_stage: Annotated[
        int, Key("zero_optimization.stage"), BeforeValidator(whole_number(0, 3, write="e.g. 1"))
    ] = 1
    zero: Annotated[Frozen, Key("zero_optimization")] = Field(default_factory=FrozenDict)
    distributed_backend: DistributedBackend | None = None  # None: nccl on a GPU, gloo without one
    fp32_allreduce: Flag = False
    communication_data_type: Precision | None = None
    world_size: Annotated[Positive, Key(None)] = 1
    data_parallel_size: Annotated[Positive, Key(None)] = 1


class CheckpointConfig(Section):
    save: Text | None = None
    load: Text | None = None
    save_interval: Positive | None = None
    keep_last_n_checkpoints: Positive | None = None
    extra_save_iters: Steps = ()
    finetune: Flag = False


class EvaluationConfig(Section):
    """Own keys: perplexity by length, which train.py measures at the end."""

    eval_lengths: Lengths = ()
    eval_tokens: Positive = 65536  # target tokens per length
    eval_context_baseline: Count = 0  # context of the limited-context baseline; 0 = none
    eval_split: EvalSplit = "valid"
    eval_batch_tokens: Positive = 4096  # tokens per forward batch


class LoggingConfig(Section):
    use_wandb: Flag = False
    wandb_project: Text | None = None
    wandb_team: Text | None = None
    wandb_group: Text | None = None
    wandb_host: Text | None = None
    wandb_mode: WandbMode | None = None


class Config(BaseModel):
    """All settings of a run, built by `load_config`. Equal if all sections are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    lr: LrConfig
    training: TrainingConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    origins: Mapping[str, str] = {}  # field -> where it was set

    def sections(self) -> Iterator[tuple[str, Section]]:
        """(name, section) in the order of declaration."""
        return ((name, getattr(self, name)) for name in SECTIONS)

    def to_flat_dict(self) -> dict[str, Any]:
        """Flat NeoX keys, fit for JSON; loading them at the same world size gives `self`."""
        return flat.to_flat_dict(section for _, section in self.sections())

    def to_yaml(self) -> str:
        """`to_flat_dict` as the text of a file, every value read back as it is here."""
        return flat.to_yaml(self.to_flat_dict())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in SECTIONS)

    __hash__ = None  # type: ignore[assignment]


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
