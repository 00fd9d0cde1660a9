"""Define the language model: embedding -> blocks -> final norm -> output.

    x_0     = E[token] (+ position vector)          theta = parameters of the distance kernel
    x_{l+1} = block_l(x_l, theta)
    logits  = output(norm(x_L))                     output = E^T if the weights are tied

The distance kernel is a bias or factor in attention that depends only on the query-key distance.

Legend: B batch, T positions, D hidden size, V padded vocabulary, H heads, N columns of theta (one
for each parameter of a head).

Tensor parallelism (`tp`) shards the layers. Initial values are drawn for each full tensor and then
sliced. The ranks of the context-parallel group (`cp`) hold the same weights and different
positions. Under sequence parallelism, the ranks of `tp` also hold different positions, except
inside the sharded layers (see `SequenceSplit`).
"""

from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.model.block import Block
from megatron.model.block_norm import BlockNorm
from megatron.model.cache import LayerCache
from megatron.model.embedding import EmbeddingLayer
from megatron.model.init import initialise
from megatron.model.shape import Plan
from megatron.parallel.collectives import all_gather, gather_from
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.layers import ColumnLinear, RowLinear
from megatron.parallel.loss import losses_in_pieces


class GPT(nn.Module):
    """Decoder-only language model. `forward` returns logits, or losses if targets are given."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.shape, self.pos, self.attends, self.cp = plan.shape, plan.pos, plan.attends, plan.cp
        self.split, self.documents = plan.split, plan.documents
        self.embedding = EmbeddingLayer(plan)
        self.layers = nn.ModuleList(Block(plan, i) for i in range(plan.shape.num_layers))
        self.final_norm = BlockNorm(plan.shape.block, plan.tp)
        self.output: nn.Linear | None = None
        if not plan.shape.tie_weights:
            output_class, arguments = output_layer(plan)
            self.output = output_class(**arguments)
        self.logits_tp, self.z_loss = logits_group(plan), plan.z_loss
        initialise(self.named_parameters(), plan.shape, plan.seed)

    def forward(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None, *, first: int = 0
    ) -> torch.Tensor:
        """Return the logits [batch, positions, vocabulary], or the losses [batch, positions].

        Every rank must pass the full sequence, and gets the result for the full sequence.

        Args:
            tokens_BT: The token ids [batch, positions].
            targets_BT: The target ids. If given, the result is the loss of each target in nats. If
                autograd is enabled, the loss includes the z-loss.
            first: The first position whose logits are returned. It must be 0 under sequence or
                context parallelism.
        """
        length = tokens_BT.shape[1]
        self.embedding.require_positions(length)
        starts_BS = None
        if self.documents is not None:
            starts_BS = self.documents.starts(self.split.padded(tokens_BT), self.training)
        x_BTD, theta_HN = self.embedding(self.split.context_slice(tokens_BT), starts_BS)
        recompute = self.shape.checkpoint_activations and self.training
        for layer in self.layers:
            if recompute:
                x_BTD = checkpoint(layer, x_BTD, theta_HN, starts_BS, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, theta_HN, starts_BS)
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is None:
            result = gather_from(self._logits(x_BTD[:, first:]), self.logits_tp, -1)
        else:
            result = losses_in_pieces(
                self._logits, x_BTD, self.split.context_slice(targets_BT), self.shape.vocab_size,
                self.logits_tp, ranks=self.split.tp_slices,
                z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,
            )  # fmt: skip
        return all_gather(result, self.cp, 1)[:, :length]

    @property
    def longest_text(self) -> int | None:
        """The number of tokens to which the harness and exports' clients cut a text, or None."""
        # Only a table of learned vectors is a real limit. For rotary embeddings and sinusoidal
        # vectors, it is `max_position_embeddings`, as in GPT-NeoX.
        if self.embedding.positions is not None:
            return self.embedding.positions
        limited = self.pos.has("rotary") or self.pos.has("input")
        return self.shape.max_positions if limited else None

    def last_document(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt's last document, or all ids if tokens see older documents."""
        end = self.documents and self.documents.end
        return ids[len(ids) - ids[::-1].index(end) :] if end in ids else ids

    def new_cache(self, lengths_B: torch.Tensor) -> list[LayerCache]:
        """Return an empty cache for each layer, for prompts of `lengths_B` tokens."""
        padding_B = lengths_B.max() - lengths_B
        attentions = (cast(Block, layer).attention for layer in self.layers)
        return [LayerCache(padding_B, attention.window) for attention in attentions]

    def extend(
        self, tokens_BT: torch.Tensor, cache: list[LayerCache], *, last_only: bool = True
    ) -> torch.Tensor:
        """Add the next tokens of each text to the cache, and return the logits of these tokens.

        If tokens attend only to their own document, a document may end with the last token of
        `tokens_BT`, but not before it. Every tensor-parallel rank must call this method. Sequence
        and context parallelism must be off.

        Args:
            tokens_BT: The next tokens of each text. Shorter texts are padded at the start.
            cache: The cache of each layer, from `new_cache`.
            last_only: Whether to return only the logits of the last tokens [batch, vocabulary]. If
                false, the result is [batch, positions, vocabulary].

        Raises:
            PositionalError: A text is too long for the learned position vectors.
        """
        length = tokens_BT.shape[1]
        self.embedding.require_positions(cache[0].columns + length)
        positions_BT = cache[0].positions(length)
        x_BTD, theta_HN = self.embedding(tokens_BT, positions_BT=positions_BT)
        for layer, kept in zip(self.layers, cache, strict=True):
            x_BTD = layer(x_BTD, theta_HN, cache=kept)
        if self.documents is not None and self.documents.end is not None:
            ended_B = tokens_BT[:, -1] == self.documents.end
            for kept in cache if ended_B.any() else ():
                kept.forget(ended_B, restart=self.documents.restart_positions)
        x_BTD = self.final_norm(x_BTD[:, -1:] if last_only else x_BTD)
        logits_BTV = gather_from(self._logits(x_BTD), self.logits_tp, -1)
        return logits_BTV[:, -1] if last_only else logits_BTV

    def _logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the logits for the hidden states after the final norm.

        If the vocabulary is sharded, the result is this rank's slice of the logits.
        """
        if self.output is not None:
            return self.output(x_BTD)
        assert self.embedding.word_embeddings is not None
        return self.embedding.word_embeddings(x_BTD, project=True)

    @property
    def theta(self) -> nn.Parameter | None:
        """The trained positional parameters with a value for each head [heads, parameters].

        None if the positional embedding has no trained parameters.
        """
        return self.embedding.theta

    @property
    def theta_parts(self) -> tuple[nn.Parameter, ...]:
        """The positional embedding's trained parameters, in a tuple of at most two tensors.

        The first tensor is `theta` [heads, parameters]. The second tensor is the parameters
        [1, parameters] that all heads share, if there are any. Without trained parameters, the
        tuple is empty.
        """
        return self.embedding.theta_parts


def output_layer(plan: Plan) -> tuple[type[nn.Linear], dict[str, Any]]:
    """Return the class and the constructor arguments of an output layer that is not tied."""
    shape = plan.shape
    sizes = {"in_features": shape.block.hidden_size, "out_features": shape.vocab_size}
    sizes |= {"tp": plan.tp, "bias": shape.output_bias}
    if shape.row_parallel_output:
        return RowLinear, sizes | {"scatter": True}
    return ColumnLinear, sizes


def logits_group(plan: Plan) -> TensorGroup:
    """Return the group of ranks over which the vocabulary dimension of the logits is sharded."""
    return ALONE if plan.shape.row_parallel_output and not plan.shape.tie_weights else plan.tp
