"""Define the model's first layer, which returns the first hidden states x and theta.

x is the sum of token and position vectors. Theta holds the parameters of the distance kernel. The
layer stores theta as `megatron.model.theta` describes.

Legend: B batch, T positions of this rank, S positions of the full sequence, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.shape import Plan
from megatron.model.theta import StoredTheta
from megatron.parallel.collectives import copy_to
from megatron.parallel.layers import HiddenDropout, Undrawn, VocabEmbedding
from megatron.positional import PositionalEmbedding, PositionalError


class PositionTable(Undrawn, nn.Embedding):
    """The vectors of `learned`: row n, of the hidden size, is added at position n."""


class EmbeddingLayer(StoredTheta):
    """The first layer, which maps tokens [batch, positions] to (hidden states, theta).

    The hidden states are [batch, positions, hidden size]. Theta is the positional embedding's
    parameters [heads, parameters], or None if the embedding has no parameters.

    Args:
        plan: The description of the model.
        words: Whether the input is tokens. If false, the input is token vectors.
    """

    def __init__(self, plan: Plan, words: bool = True):
        super().__init__(plan)
        self.split, self.documents = plan.split, plan.documents
        shape, hidden = plan.shape, plan.shape.block.hidden_size
        self.offset = shape.position_offset
        self.word_embeddings: VocabEmbedding | None = None
        self.position_embeddings: nn.Embedding | None = None
        if words:
            self.word_embeddings = VocabEmbedding(shape.vocab_size, hidden, plan.tp)
        if any(term.kind == "input" and term.learnable for term in plan.pos.terms):
            self.position_embeddings = PositionTable(shape.max_positions, hidden)
        self.dropout = HiddenDropout(shape.block.hidden_dropout, plan.tp)

    # starts_BS [B, all positions] is the position at which each token's document starts, or None
    # if each sequence is one document. positions_BT is the position of each token, or None to
    # count from the sequence's first token. The parameters are in at least fp32.
    def forward(
        self,
        x: torch.Tensor,
        starts_BS: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BTD = x if self.word_embeddings is None else self.word_embeddings(x)
        if self.pos.has("input"):
            x_BTD = x_BTD + self._position_vectors(x_BTD, starts_BS, positions_BT)
        return self.dropout(x_BTD), self.theta_in(x_BTD.dtype)

    def _position_vectors(
        self, x_BTD: torch.Tensor, starts_BS: torch.Tensor | None, positions_BT: torch.Tensor | None
    ) -> torch.Tensor:
        length = x_BTD.shape[1]
        positions = positions_BT  # [B, T], or [T] if all sequences have the same
        if positions is None:
            positions = self.split.positions(length, x_BTD.device)
        if self.documents is not None and starts_BS is not None:
            restarted_BT = self.documents.positions(starts_BS, positions)
            positions = positions if restarted_BT is None else restarted_BT
        if self.position_embeddings is None:
            return self.pos.table(positions, x_BTD.shape[-1], x_BTD.dtype).to(x_BTD.dtype)
        # At most slices - 1 positions at the end are padding and may lie beyond the table.
        self.require_positions(length * self.split.slices - (self.split.slices - 1))
        table = self.position_embeddings.weight
        rows = (positions + self.offset).clamp(max=table.shape[0] - 1)
        if self.tp.splits_sequence:
            table = copy_to(table, self.tp)  # sums the gradient: other ranks use other rows
        return F.embedding(rows, table)

    @property
    def positions(self) -> int | None:
        """The number of positions with a learned vector, or None without such vectors."""
        table = self.position_embeddings
        return None if table is None else table.num_embeddings - self.offset

    def require_positions(self, length: int) -> None:
        """Check that a table of learned position vectors is long enough for `length` positions.

        Raises:
            PositionalError: The table has fewer rows.
        """
        if self.positions is not None and length > self.positions:
            raise PositionalError(
                f"pos_emb: {self.pos.name} has {self.positions} positions, but a sequence of "
                f"{length} came in; give shorter --lengths or fewer --max-new-tokens, or train "
                "with more max_position_embeddings or one that extrapolates, such as kerple_log"
            )


def scale_distances(model: nn.Module, scale: float) -> None:
    """From now on, multiply the query-key distances in all layers of `model` by `scale`."""
    for module in model.modules() if scale != 1.0 else ():
        pos = getattr(module, "pos", None)
        if isinstance(pos, PositionalEmbedding) and pos.has_distances:
            vars(module)["pos"] = pos.scaled(scale)
