"""Add a bias that depends on the query's position to the scores of blocked attention.

Such a bias cannot be stored as a vector over distances (see `toeplitz`). It is evaluated for each
tile. The backward pass evaluates it again, to propagate the gradient of the tile's scores to theta.

Legend: see `blocked`. N columns of theta.
"""

import torch
from torch import Tensor

from megatron.attention.tiled.tiles import QueryTile
from megatron.positional import PositionalEmbedding


class RowBias:
    """A bias that depends on the query's position, and the gradient of its parameters.

    Args:
        pos: The positional embedding.
        theta_HN: The embedding's parameters [heads, parameters].
        positions_BT: The position of each query in its document [batch or 1, queries]. The last
            query comes first.
        keys: The number of keys.
    """

    def __init__(self, pos: PositionalEmbedding, theta_HN: Tensor, positions_BT: Tensor, keys: int):
        self.pos, self.theta_HN, self.positions_BT, self.keys = pos, theta_HN, positions_BT, keys
        # Summed over the tiles processed so far.
        self.grad_HN = torch.zeros_like(theta_HN)

    def _values(self, tile: QueryTile, theta_hN: Tensor) -> Tensor:
        """Return the bias of a tile, [sequences or 1, heads, queries, keys]."""
        device = theta_hN.device
        row_R = torch.arange(tile.rows.start, tile.rows.stop, device=device)
        key_n = torch.arange(tile.seen.start, tile.seen.stop, device=device)
        d_Rn = (self.keys - 1 - row_R[:, None] - key_n).clamp(min=0)
        first = tile.items.start // self.theta_HN.shape[0]
        several = len(self.positions_BT) > 1
        batch = slice(first, first + tile.batch) if several else slice(None)
        i_bR1 = self.positions_BT[batch, tile.rows, None]
        bias_hbRn = self.pos.bias_at(theta_hN, d_Rn[None], i_bR1)
        assert bias_hbRn is not None
        return bias_hbRn.transpose(0, 1)

    def add_to(self, tile: QueryTile, scores_BHRn: Tensor) -> None:
        with torch.no_grad():
            scores_BHRn += self._values(tile, self.theta_HN[tile.heads])

    def add_gradient(self, tile: QueryTile, ds_BHRn: Tensor) -> None:
        theta_hN = self.theta_HN[tile.heads].detach().requires_grad_()
        with torch.enable_grad():
            values_bHRn = self._values(tile, theta_hN)
        ds_bHRn = ds_BHRn.sum_to_size(values_bHRn.shape).to(values_bHRn.dtype)
        (grad_hN,) = torch.autograd.grad(values_bHRn, theta_hN, ds_bHRn)
        self.grad_HN[tile.heads] += grad_hN
