"""Define the resolved configuration: immutable sections with typed fields.

The key of a field in config files is the field's name, unless the annotation `Key` gives another.
`Key(None)` marks a field that config files cannot set, because it is always derived. Defaults are
those of GPT-NeoX. If the published KERPLE code and gpt-neox have different defaults, a comment
names the source of the chosen one. Lengths are counted in tokens, iterations in optimizer steps,
and batch sizes in sequences.
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
    OnBadLoss,
    OptimizerType,
    PositionalName,
    Precision,
    Side,
    Tokenizer,
    WandbMode,
    Width,
)
from megatron.config.fields import (
    Amount,
    Betas,
    Count,
    Degree,
    Epsilon,
    ExitCode,
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
from megatron.config.theta import ThetaFrozen, ThetaInit

DERIVED: Any = None
"""The default of fields that `load_config` computes from other fields if they are not given."""


class Section(BaseModel):
    """The base class of the sections: an immutable group of fields that rejects unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_kv_heads: Positive = DERIVED  # default: num_attention_heads
    seq_length: Positive
    seq_length_val: Positive = DERIVED  # default: seq_length
    max_position_embeddings: Positive = DERIVED  # rows of `learned`; default: seq_length
    pos_emb: PositionalName = "learned"
    pos_emb_options: Frozen = Field(default_factory=FrozenDict)
    theta_init: ThetaInit = Field(default_factory=FrozenDict)  # not in GPT-NeoX: start values
    theta_per_layer: Flag = False  # else layers with the same embedding share theta
    sliding_window_width: Width = None  # the largest distance of a key, or distances per layer
    reset_attention_mask: Flag = False  # Megatron's name: a token sees only its own document
    reset_position_ids: Flag = False  # Megatron's name: positions restart at each document
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
    bias_gelu_fusion: Flag = False  # true: tanh approximation of gelu, as in the published code
    init_method: Init = "normal"
    output_layer_init_method: Init = "scaled_normal"
    init_method_std: PositiveNumber = 0.02
    attention_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    hidden_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    make_vocab_size_divisible_by: Positive = 128
    attention_backend: AttentionBackend = "auto"
    published_numerics: Flag = False  # not in GPT-NeoX: round 16-bit numbers as the published code
    checkpoint_activations: Flag = False
    output_layer_parallelism: Side = "column"  # published: row; both compute the same function


class DataConfig(Section):
    # A prefix (the path of shards without .bin or .idx), a glob of prefixes, a list of prefixes and
    # globs, or builtin:python-stdlib.
    data_path: Paths | None = None
    # An alternative to data_path and split: the corpora of each split. Samples are taken from them
    # in proportion to the weights, which are equal by default.
    train_data_paths: PathList = ()
    valid_data_paths: PathList = ()
    test_data_paths: PathList = ()
    train_data_weights: Weights = ()
    valid_data_weights: Weights = ()
    test_data_weights: Weights = ()
    weight_by_num_documents: Flag = False
    weighted_sampler_alpha: PositiveNumber = 1.0  # gpt-neox's default; published code: 0.3
    data_dir: Text = "data"  # folder for the token shards of builtin corpora
    split: Split = "969, 30, 1"
    tokenizer_type: Tokenizer = "GPT2BPETokenizer"
    vocab_file: Text | None = None
    merge_file: Text | None = None


class BatchConfig(Section):
    """The batch sizes, in sequences.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
    data_parallel_size.
    """

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
    # Not in GPT-NeoX: whether weight decay applies to theta, the parameters of KERPLE and T5; its
    # learning rate; whether it is trained.
    weight_decay_positional: Flag = False
    theta_lr_multiplier: PositiveNumber = 1.0  # theta's learning rate, as a multiple of `lr`
    theta_frozen: ThetaFrozen = False  # true, or the parameters that keep their start values
    gradient_clipping: Amount = 1.0  # 0 = off; gpt-neox's default; published code: off


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
    train_iters: Count  # 0: do not train, only evaluate
    eod_mask_loss: Flag = False  # the first token of a document does not count in the loss
    eval_interval: Positive = 1000
    eval_iters: Count = 100
    log_interval: Positive = 100
    exit_interval: Positive | None = None
    exit_duration_in_mins: PositiveNumber | None = None  # Megatron-LM's name: save and leave then
    # Not in GPT-NeoX: the exit code of a job that saves and leaves early (after SIGTERM, SIGUSR1,
    # Ctrl-C or exit_duration_in_mins), for schedulers that restart only failed jobs.
    preemption_exit_code: ExitCode = 0
    # Not in GPT-NeoX: what to do after a step whose loss or gradient is not finite, or whose loss
    # is more than this many nats above the average of the steps before it.
    on_bad_loss: OnBadLoss = "stop"
    loss_spike_threshold: PositiveNumber | None = None
    seed: Count = 1234
    precision: Precision = "fp32"
    loss_scale: Annotated[Amount, Key("fp16.loss_scale")] = 0.0  # 0 = dynamic
    initial_scale_power: Annotated[
        int, Key("fp16.initial_scale_power"), BeforeValidator(whole_number(0, 127))
    ] = 16
    loss_scale_window: Annotated[Positive, Key("fp16.loss_scale_window")] = 1000
    hysteresis: Annotated[Positive, Key("fp16.hysteresis")] = 2
    min_loss_scale: Annotated[Positive, Key("fp16.min_loss_scale")] = 1
    grad_accum_dtype: Annotated[Precision | None, Key("data_types.grad_accum_dtype")] = None


class ParallelConfig(Section):
    pipe_parallel_size: Degree = 1
    model_parallel_size: Degree = 1  # tensor parallelism
    sequence_parallel: Flag = False  # tensor-parallel ranks split positions outside sharded layers
    context_parallel_size: Degree = 1  # Ulysses: number of ranks that share one sequence
    zero_stage: Annotated[
        int, Key("zero_optimization.stage"), BeforeValidator(whole_number(0, 3, write="e.g. 1"))
    ] = 1
    zero: Annotated[Frozen, Key("zero_optimization")] = Field(default_factory=FrozenDict)
    distributed_backend: DistributedBackend | None = None  # None: nccl on a GPU, gloo without one
    # Not in GPT-NeoX: the seconds without a sign of life after which a rank counts as lost.
    heartbeat_timeout: Annotated[
        int, BeforeValidator(whole_number(5, write="seconds, e.g. 300"))
    ] = 300
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
    async_save: Flag = False  # not in GPT-NeoX: copy the state, and write it beside training
    finetune: Flag = False


class EvaluationConfig(Section):
    """The settings for perplexity by sequence length, measured by train.py after training.

    These keys do not exist in GPT-NeoX.
    """

    eval_lengths: Lengths = ()
    eval_tokens: Positive = 65536  # number of predicted tokens for each length
    eval_context_baseline: Count = 0  # context length of a baseline evaluation; 0 = no baseline
    eval_split: EvalSplit = "valid"
    eval_batch_tokens: Positive = 4096  # tokens in a batch
    eval_distance_scale: PositiveNumber = 1.0  # the kernel sees every distance times this factor


class LoggingConfig(Section):
    use_wandb: Flag = False
    wandb_project: Text | None = None
    wandb_team: Text | None = None
    wandb_group: Text | None = None
    wandb_host: Text | None = None
    wandb_mode: WandbMode | None = None


class Config(BaseModel):
    """All settings of a run, as built by `load_config`. Configs with equal sections are equal.

    Attributes:
        notes: Remarks for the user, for example about keys that have no effect.
        sources: The paths of the config files.
        origins: Maps the name of each given field to the place where it was set.
    """

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
    origins: Mapping[str, str] = {}

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Return pairs (name, section) in the order of their declaration."""
        return ((name, getattr(self, name)) for name in SECTIONS)

    def to_flat_dict(self) -> dict[str, Any]:
        """Return all settings as a dict of GPT-NeoX keys that can be written as JSON or YAML.

        Loading that dict with the same number of processes gives a config that equals `self`.
        """
        return flat.to_flat_dict(section for _, section in self.sections())

    def to_yaml(self) -> str:
        """Return the settings as YAML text, from which `load_config` reads the same values."""
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
