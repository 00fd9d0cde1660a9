"""Describe the GPT model as a list of layers that a pipeline engine distributes over its stages.

    tokens -> words -> embedding -> block 0 -> ... -> block L-1 -> norm -> output -> logits
                |        |  theta      ^                  ^
                |starts  '-------------+------------------'
                '--------^-------------^------------------^

A layer passes up to three tensors to the next layer:

    x       float [B, T, D]   the hidden states
    theta   fp32 [H, N]       the distance kernel's trained parameters, if a later block reads them
    starts  int64 [B, S]      the position at which each token's document starts, if tokens attend
                              only to their own document

The last block returns x alone. The only stored copy of a trained theta is on stage 0. This stage
receives theta's gradient, summed over all blocks. A theta that is not trained (fixed slopes) is not
passed between layers, because each block has its own copy.

Legend: B batch, T positions of this rank, S positions of the full sequence, D hidden size, H heads,
N parameters per head, L blocks.

Parameters have the same names as in `GPT`. A layer's name is the prefix of its parameters' names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.model.block import Block
from megatron.model.block_norm import BlockNorm
from megatron.model.embedding import EmbeddingLayer
from megatron.model.gpt import logits_group, output_layer
from megatron.model.shape import Plan
from megatron.model.theta import FixedTheta, initial_theta
from megatron.parallel.layers import VocabEmbedding
from megatron.parallel.loss import losses_in_pieces, mean_loss

WORDS = "embedding.word_embeddings"
Flow = torch.Tensor | tuple[torch.Tensor, ...]


def _parts(flow: Flow) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Divide the output of a pipeline layer into (x, theta, starts); a missing tensor is None."""
    x, *others = flow if isinstance(flow, tuple) else (flow,)
    theta = next((each for each in others if each.is_floating_point()), None)
    starts = next((each for each in others if not each.is_floating_point()), None)
    # `x` is hidden states or token vectors.
    return x, theta, starts


def _flow(*parts: torch.Tensor | None) -> Flow:
    """Combine `parts` into the output of a pipeline layer, without the parts that are None."""
    x, *others = (part for part in parts if part is not None)
    return (x, *others) if others else x


@dataclass(frozen=True)
class Layer:
    """A description of one layer, from which a pipeline stage builds the layer.

    Attributes:
        name: The prefix of the layer's parameter names.
        build: The layer's class.
        args: The keyword arguments of the class.
        call: A function of (module, input) that replaces the module's `forward`. None means that
            `forward` is used.
        tied: Whether all layers with this name share one module.
    """

    name: str
    build: type[nn.Module]
    args: dict[str, Any] = field(default_factory=dict)
    call: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    tied: bool = False


class PipeWords(VocabEmbedding):
    """The token embedding as a pipeline layer."""

    def __init__(self, vocab_size: int, hidden_size: int, plan: Plan):
        super().__init__(vocab_size, hidden_size, plan.tp)
        self.documents = plan.documents

    # If tokens attend only to their own document, the result also contains the position at which
    # each token's document starts.
    def forward(self, x: torch.Tensor, project: bool = False) -> Any:
        vectors = super().forward(x, project)
        if project or self.documents is None:
            return vectors
        return vectors, self.documents.starts(x, self.training)


class PipeEmbedding(EmbeddingLayer):
    """The second pipeline layer, which maps token vectors to the first hidden states."""

    def __init__(self, plan: Plan):
        super().__init__(plan, words=False)

    def forward(self, flow: Flow) -> Flow:
        x_BTD, _, starts_BS = _parts(flow)
        x_BTD, theta_HN = super().forward(x_BTD, starts_BS)
        return _flow(x_BTD, None if self.theta is None else theta_HN, starts_BS)


class PipeBlock(Block):
    """A transformer block as a pipeline layer.

    Args:
        plan: The description of the model.
        index: The number of the layer, counted from 0.
        fixed_HN: The positional embedding's parameters if no parameter is trained, otherwise None.
    """

    def __init__(self, plan: Plan, index: int, *, fixed_HN: torch.Tensor | None):
        super().__init__(plan, index)
        self.fixed_theta = None if fixed_HN is None else FixedTheta(plan.pos, fixed_HN)
        later = range(index + 1, plan.shape.num_layers)
        self.last = not later
        # The engine expects a gradient of theta from each stage that receives it.
        self.passes_theta = any(plan.layer(i).pos.parameters for i in later)
        self.recompute = plan.shape.checkpoint_activations

    def forward(self, flow: Flow) -> Flow:
        x_BTD, theta_HN, starts_BS = _parts(flow)
        used_HN = theta_HN
        if self.fixed_theta is not None:
            used_HN = self.fixed_theta(torch.promote_types(x_BTD.dtype, torch.float32))
        if self.recompute and self.training:
            x_BTD = checkpoint(super().forward, x_BTD, used_HN, starts_BS, use_reentrant=False)
        else:
            x_BTD = super().forward(x_BTD, used_HN, starts_BS)
        if self.last:
            return x_BTD
        return _flow(x_BTD, theta_HN if self.passes_theta else None, starts_BS)


def project(words: VocabEmbedding, x_BTD: torch.Tensor) -> torch.Tensor:
    """Return logits: hidden states multiplied by the matrix of the token embedding."""
    return words(x_BTD, project=True)


def pipeline_layers(plan: Plan) -> list[Layer]:
    """Return the layers, in order, of a pipeline that computes the same as `GPT(plan)`."""
    shape, tp = plan.shape, plan.tp
    words = {"vocab_size": shape.vocab_size, "hidden_size": shape.block.hidden_size, "plan": plan}
    fixed_HN = None
    if plan.pos.has("distance") and not plan.pos.trained_parameters:
        fixed_HN = initial_theta(plan)
    block = {"plan": plan, "fixed_HN": fixed_HN}
    layers = [
        Layer(WORDS, PipeWords, words, tied=shape.tie_weights),
        Layer("embedding", PipeEmbedding, {"plan": plan}),
    ]
    layers += [
        Layer(f"layers.{i}", PipeBlock, block | {"index": i}) for i in range(shape.num_layers)
    ]
    layers.append(Layer("final_norm", BlockNorm, {"shape": shape.block, "tp": tp}))
    if shape.tie_weights:
        layers.append(Layer(WORDS, PipeWords, words, project, tied=True))
    else:
        output_class, output = output_layer(plan)
        layers.append(Layer("output", output_class, output))
    return layers


def pipeline_loss(plan: Plan) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function of the last pipeline stage.

    The function maps logits [batch, positions, vocabulary] and targets [batch, positions] to the
    mean loss. Under `torch.no_grad`, the function returns the loss of each target instead.
    """
    logits_tp = logits_group(plan)

    def loss(
        logits_BTV: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        # With (targets, divisor), the mean is the sum of the losses divided by the divisor.
        targets_BT, divisor = labels if isinstance(labels, tuple) else (labels, None)
        trains = torch.is_grad_enabled()
        losses_BT = losses_in_pieces(
            lambda logits: logits,  # they exist, but their fp32 copies are made in pieces
            logits_BTV,
            targets_BT,
            plan.shape.vocab_size,
            logits_tp,
            z_loss=plan.z_loss if trains else 0.0,
        )
        return mean_loss(losses_BT, targets_BT, divisor) if trains else losses_BT

    return loss
