"""Define the config sections for training: batch sizes, optimizer, learning rate and steps."""

from typing import Annotated

from pydantic import BeforeValidator

from megatron.config.choices import OptimizerType, Precision, choice
from megatron.config.fields import (
    Amount,
    Betas,
    Count,
    Epsilon,
    ExitCode,
    Flag,
    Key,
    Positive,
    PositiveNumber,
    Stages,
    number,
    whole_number,
)
from megatron.config.sections.base import DERIVED, Section
from megatron.config.theta_fields import ThetaFrozen


class BatchConfig(Section):
    """The batch sizes, in sequences, and the number of gradient accumulation steps."""

    # train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
    # data_parallel_size.

    train_batch_size: Positive = DERIVED  # sequences in a step, of all processes
    train_micro_batch_size_per_gpu: Positive = DERIVED  # sequences that one process reads at once
    # micro-batches in a step; default: 1, or what follows from the others
    gradient_accumulation_steps: Positive = DERIVED


class OptimizerConfig(Section):
    type: Annotated[OptimizerType, Key("optimizer.type")] = "adam"  # `adam` is AdamW
    lr: Annotated[Amount, Key("optimizer.params.lr")]  # peak learning rate
    # decay of Adam's averages
    betas: Annotated[Betas, Key("optimizer.params.betas")] = (0.9, 0.999)
    eps: Annotated[Epsilon, Key("optimizer.params.eps")] = 1e-8  # epsilon of Adam
    # of sgd (default: 0) and muon (0.95, as in torch)
    momentum: Annotated[Amount, Key("optimizer.params.momentum")] = DERIVED
    # not in GPT-NeoX, for muon alone: make queries, keys, values, gate and value orthogonal one by
    # one; false: the matrices that hold them
    split_fused: Annotated[Flag, Key("optimizer.params.split_fused")] = True
    weight_decay: Amount = 0.01  # decay of the weights; the published code's default, gpt-neox: 0.1
    weight_decay_positional: Flag = False  # not in GPT-NeoX: weight decay applies to theta, too
    # not in GPT-NeoX: theta's learning rate, as a multiple of `lr`
    theta_lr_multiplier: PositiveNumber = 1.0
    # not in GPT-NeoX: true, or the parameters of theta that keep their start values
    theta_frozen: ThetaFrozen = False
    # largest norm of the gradient; 0 = off; gpt-neox's default, published code: off
    gradient_clipping: Amount = 1.0


class LrConfig(Section):
    # form of the decay
    decay_style: Annotated[
        str, choice("constant linear cosine exponential wsd"), Key("lr_decay_style")
    ] = "linear"
    # step at which the decay ends; default: train_iters
    decay_iters: Annotated[Positive, Key("lr_decay_iters")] = DERIVED
    # fraction of lr_decay_iters in which the learning rate rises
    warmup: Annotated[
        float,
        BeforeValidator(number(0, 1, write="the fraction of lr_decay_iters to warm up, e.g. 0.01")),
    ] = 0.01
    min_lr: Amount = 0.0  # learning rate at the end of the decay
    # of wsd: the fraction of lr_decay_iters that decays (gpt-neox's PR 1375)
    wsd_decay_ratio: Annotated[
        float,
        BeforeValidator(number(0, 1, above=True, write="the fraction of lr_decay_iters, e.g. 0.1")),
    ] = 0.1
    # of wsd: form of the decay (Megatron-LM's key; gpt-neox's PR: cosine)
    wsd_decay_style: Annotated[
        str, choice("cosine linear exponential minus_sqrt"), Key("lr_wsd_decay_style")
    ] = "cosine"
    use_checkpoint_lr_scheduler: Flag = False  # a resumed run keeps its checkpoint's schedule


class TrainingConfig(Section):
    train_iters: Count  # steps; 0: do not train, only evaluate
    # not in GPT-NeoX: [[step, length], ...]: after this many steps (first: 0), sequences are cut
    # into shorter ones of this length (last: seq_length), so a step keeps its tokens
    curriculum: Stages = ()
    eod_mask_loss: Flag = False  # the first token of a document does not count in the loss
    # Megatron-LM's name: all targets that count have the same weight in the loss of a step; false,
    # as in GPT-NeoX: all micro-batches have the same weight
    calculate_per_token_loss: Flag = True
    # not in GPT-NeoX: factor of log(softmax's denominator)^2, added to the training loss
    z_loss: Amount = 0.0
    eval_interval: Positive = 1000  # steps between validations
    eval_iters: Count = 100  # batches of a validation
    log_interval: Positive = 100  # steps between log lines
    # save and leave at the next multiple of this number of steps
    exit_interval: Positive | None = None
    # Megatron-LM's name: minutes after which to save and leave
    exit_duration_in_mins: PositiveNumber | None = None
    # not in GPT-NeoX: the exit code of a job that saves and leaves early (after SIGTERM, SIGUSR1,
    # Ctrl-C or exit_duration_in_mins), for schedulers that restart only failed jobs
    preemption_exit_code: ExitCode = 0
    # not in GPT-NeoX: what to do after a step whose loss or gradient is not finite
    on_bad_loss: Annotated[str, choice("stop skip roll_back")] = "stop"
    # not in GPT-NeoX: nats above the average loss from which on a step is bad
    loss_spike_threshold: PositiveNumber | None = None
    seed: Count = 1234  # seed of weights, sample order and dropout
    precision: Precision = "fp32"  # fp32, or the type of 16 bits in which the model computes
    # not in GPT-NeoX: train with the model compiled by torch.compile; needs a C++ compiler on a CPU
    torch_compile: Flag = False
    # not in GPT-NeoX: the mode of torch.compile; reduce-overhead and max-autotune use CUDA graphs
    torch_compile_mode: Annotated[
        str, choice("default reduce-overhead max-autotune max-autotune-no-cudagraphs")
    ] = "default"
    # not in GPT-NeoX: the CPU finds the compiled kernels of attention_backend fused faster
    cached_launches: Flag = False
    loss_scale: Annotated[Amount, Key("fp16.loss_scale")] = 0.0  # 0 = dynamic loss scale
    # the first dynamic loss scale is 2 to this power
    initial_scale_power: Annotated[
        int, Key("fp16.initial_scale_power"), BeforeValidator(whole_number(0, 127))
    ] = 16
    # steps without overflow after which the loss scale doubles
    loss_scale_window: Annotated[Positive, Key("fp16.loss_scale_window")] = 1000
    # overflows before the loss scale is halved; with ZeRO-0, DeepSpeed halves it at each overflow
    hysteresis: Annotated[Positive, Key("fp16.hysteresis")] = 2
    # the smallest dynamic loss scale
    min_loss_scale: Annotated[Positive, Key("fp16.min_loss_scale")] = 1
    # type in which gradients are summed over micro-batches
    grad_accum_dtype: Annotated[Precision | None, Key("data_types.grad_accum_dtype")] = None
