"""Define the config sections for training: batch sizes, optimizer, learning rate and steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from megatron.config.choices import DecayStyle, OnBadLoss, OptimizerType, Precision, WsdDecay
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
    number,
    whole_number,
)
from megatron.config.sections.base import DERIVED, Section
from megatron.config.theta import ThetaFrozen


class BatchConfig(Section):
    """The batch sizes, in sequences, and the number of gradient accumulation steps.

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
    # of sgd (default: 0) and muon (0.95, as in torch)
    momentum: Annotated[Amount, Key("optimizer.params.momentum")] = DERIVED
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
    # Only for lr_decay_style wsd: the part of lr_decay_iters that decays (gpt-neox's PR 1375), and
    # the form of the decay (Megatron-LM's key; gpt-neox's PR has cosine).
    wsd_decay_ratio: Annotated[
        float,
        BeforeValidator(number(0, 1, above=True, write="the fraction of lr_decay_iters, e.g. 0.1")),
    ] = 0.1
    wsd_decay_style: Annotated[WsdDecay, Key("lr_wsd_decay_style")] = "cosine"
    use_checkpoint_lr_scheduler: Flag = False


class TrainingConfig(Section):
    train_iters: Count  # 0: do not train, only evaluate
    eod_mask_loss: Flag = False  # the first token of a document does not count in the loss
    z_loss: Amount = 0.0  # factor of log(softmax's denominator)^2, which training adds to the loss
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
