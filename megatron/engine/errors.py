"""The training engine's errors. Each error message names the fault, its place and its remedy."""

from megatron.errors import UserError


class StartError(UserError):
    """This process cannot join the job as configured, or the ranks' configs or data differ."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, cannot be written, or does not fit this run."""


class FailedElsewhereError(CheckpointError):
    """Another rank has failed to write its part of a checkpoint, and reports the cause."""


class DivergedError(UserError):
    """Training cannot continue: a loss or weight is not finite, or the fp16 gradients overflow."""


class BadLossError(DivergedError):
    """The loss, its gradient or a weight is not finite, or the loss has risen too much."""


class HubError(UserError):
    """A model cannot be exported to transformers, or imported from it."""


class RunLogError(UserError):
    """TensorBoard or Weights & Biases could not be started."""
