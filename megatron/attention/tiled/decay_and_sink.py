"""Add a decay and a sink to the scores of blocked attention, and compute their gradients.

    S_ij <- S_ij - (c_j - c_m)            P = softmax(S) (1 - p)       p_i = sigmoid(z_i - lse_i(S))
    dc_j = -(sum of dS over column j)     dz_i = -p_i rowsum(P dP)_i   ds_h = sum of dz over head h

As in `blocked`, dS, dP, dc, dz and ds are gradients of the loss. lse is the logsumexp over keys.

c is the decay, m is the middle row of a tile and s_h is the sink of a head. All rows i of the tile
use c_m instead of c_i. This adds the constant c_m - c_i to the logits of row i, which does not
change the softmax over keys. With a sink, the softmax has one more key, the null key, with the
logit z_i = s_h - (c_i - c_m) and the weight p_i. The gradient dz_i of z_i is also subtracted from
dc_i. Without a sink, p_i is 0.

c is a running sum over positions (see `forget_gate`). It is large in a long sequence, so c_j - c_m
is computed in fp64 and then rounded to the compute precision. The constant c_m - c_i is large if c
changes much from each position to the next, that is, if a forget gate forgets within a few
positions. Adding a large constant to the logits increases their rounding errors. fp32 outputs are
off by 7e-6 if c changes by 1 from each position to the next, and by 4e-5 if c changes by 5.
(Outputs of `eager` are off by less than 1e-6.)

Legend: see `blocked`.
"""

import torch
from torch import Tensor

from megatron.attention.tiled.tiles import QueryTile


def softmax(scores_mRn: Tensor) -> Tensor:
    """Replace the scores of a tile by their softmax, in place, and return their log-sum-exp."""
    highest_mR = scores_mRn.amax(-1)
    torch.softmax(scores_mRn, dim=-1, out=scores_mRn)
    return highest_mR - scores_mRn.amax(-1).log()  # the largest probability is exp(highest - lse)


class Decay:
    """The decay c of one attention call, and the gradient of c. A forget gate computes a decay.

    c_i - c_j is added to the logit of query i and key j.

    Args:
        c_BHS: The sum of all log-decays up to each position [batch, heads, keys].
        dtype: The dtype in which attention is computed.
    """

    def __init__(self, c_BHS: Tensor, dtype: torch.dtype):
        self.c_NS, self.dtype = c_BHS.double().flatten(0, 1), dtype
        # [batch * heads, keys], summed over the tiles processed so far.
        self.grad_NS = torch.zeros_like(self.c_NS)

    def of_keys(self, tile: QueryTile) -> Tensor:
        """Return the decay at the tile's keys, relative to the middle query of the tile."""
        return self._relative(tile, tile.seen)[:, None]

    def of_rows(self, tile: QueryTile) -> Tensor:
        """Return the decay at the tile's queries, relative to the middle query of the tile."""
        keys = self.c_NS.shape[1]
        return self._relative(tile, slice(keys - tile.rows.stop, keys - tile.rows.start)).flip(1)

    def _relative(self, tile: QueryTile, positions: slice) -> Tensor:
        middle = self.c_NS.shape[1] - (tile.rows.start + tile.rows.stop + 1) // 2
        c_mX = self.c_NS[tile.items, positions]
        return (c_mX - self.c_NS[tile.items, middle, None]).to(self.dtype)

    def add_gradient(self, tile: QueryTile, ds_mRn: Tensor) -> None:
        """Add the contribution of one tile to the gradient of the decay."""
        self.grad_NS[tile.items, tile.seen] -= ds_mRn.sum(1)


class NullKey:
    """The attention sink of one call: an additional key with the value 0.

    Args:
        sink_H: The logit of each head's sink.
        q_NTE: The queries [batch * heads, queries, head size]. Only their shape and dtype are used.
        decay: The decay of the call, or None.
    """

    def __init__(self, sink_H: Tensor, q_NTE: Tensor, decay: Decay | None):
        # Below, for each query: the sink's softmax weight, and the gradient of its logit.
        self.sink_N1 = sink_H.to(q_NTE.dtype).repeat(len(q_NTE) // len(sink_H))[:, None]
        self.weight_NT, self.grad_NT = (torch.zeros_like(q_NTE[..., 0]) for _ in range(2))
        self.decay = decay

    def softmax(self, tile: QueryTile, scores_mRn: Tensor) -> Tensor:
        """Replace the scores of a tile by their softmax, in place, and return their log-sum-exp.

        The softmax and the log-sum-exp include the null key, which has no column in `scores_mRn`.
        """
        null_mR = self.sink_N1[tile.items]
        if self.decay is not None:
            null_mR = null_mR - self.decay.of_rows(tile)
        lse_mR = softmax(scores_mRn)
        logit_mR = null_mR - lse_mR
        self.weight_NT[tile.items, tile.rows] = logit_mR.sigmoid()
        scores_mRn *= logit_mR.neg().sigmoid()[..., None]
        return lse_mR.logaddexp(null_mR)

    def add_gradient(
        self,
        tile: QueryTile,
        probs_mRn: Tensor,
        dprobs_mRn: Tensor,
        spare_mRn: Tensor,
        dlse_mR: Tensor | None,
    ) -> None:
        """Store the gradient of the sink's logit for each query of a tile.

        Args:
            tile: The tile.
            probs_mRn: The attention probabilities of the tile.
            dprobs_mRn: The gradient of these probabilities.
            spare_mRn: A buffer, which is overwritten.
            dlse_mR: The gradient of the log-sum-exp of each softmax. None means 0.
        """
        delta_mR = torch.mul(probs_mRn, dprobs_mRn, out=spare_mRn).sum(-1)
        delta_mR = delta_mR if dlse_mR is None else delta_mR - dlse_mR
        self.grad_NT[tile.items, tile.rows] = -self.weight_NT[tile.items, tile.rows] * delta_mR
