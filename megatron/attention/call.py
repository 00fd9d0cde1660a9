"""Define the inputs of one attention call, and simplify them for a backend.

For example, most backends cannot apply a temperature. For these backends, `lowered` multiplies q by
the temperature. Exported models contain a copy of this file (see `megatron.hub.bundle`).

Legend: see `choice`.
"""

from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positional.base import PositionalEmbedding


@dataclass(frozen=True)
class Call:
    """The inputs of one attention call.

    Rotary embeddings must already be applied to the queries and keys.

    Attributes:
        q_BHTE: The queries [batch, heads, queries, head size].
        k_BKSE, v_BKSE: The keys and values [batch, key heads, keys, head size]. The number of key
            heads must divide the number of heads.
        pos: The positional embedding.
        theta_HN: The parameters of the positional embedding, one row for each head of q. Needed
            only if `pos` has parameters.
        scale: The number that multiplies the query-key products, usually 1/sqrt(head size).
        dropout_p: The probability of dropping a softmax weight. Random numbers are drawn from the
            default generator of q's device.
        query_offset: The position of the first query. The first key has the position 0. Keys after
            the last query are ignored. Therefore unused entries of a key cache may contain any
            numbers.
        decay_BHS: The sum c of all log-decays up to each position [batch, heads, keys]. For a
            forget gate, a log-decay is the logarithm of the gate. c_i - c_j is added to the logit
            of query i and key j. Long sequences need fp64.
        starts_BS: The position of the first token of each token's document [batch, keys]. A query
            sees only keys of its own document. None if each sequence is one document.
        window: The largest distance at which a query sees a key. None means any distance.
        positions_BT: The position of each query [batch, queries]. If it is None, biases use the
            position in the document, and temperatures use the position in the sequence.
        sequence_positions_BT: The positions that temperatures use instead of `positions_BT`.
        sink_H: The logit of each head's attention sink. None without a sink.
        return_lse: Whether to return (output, lse). lse is the log-sum-exp of each softmax.
    """

    q_BHTE: Tensor
    k_BKSE: Tensor
    v_BKSE: Tensor
    pos: PositionalEmbedding
    theta_HN: Tensor | None = None
    _: KW_ONLY
    scale: float
    dropout_p: float = 0.0
    query_offset: int = 0
    decay_BHS: Tensor | None = None
    starts_BS: Tensor | None = None
    window: int | None = None
    positions_BT: Tensor | None = None
    sequence_positions_BT: Tensor | None = None
    sink_H: Tensor | None = None
    return_lse: bool = False

    @property
    def has_kernel(self) -> bool:
        """Whether the embedding has a bias or a weight that depends on the query-key distance."""
        return self.pos.has("distance")

    @property
    def theta(self) -> Tensor:
        """The embedding's parameters [heads, parameters]. The tensor is empty if there are none."""
        if self.theta_HN is None:
            return self.q_BHTE.new_empty(self.q_BHTE.shape[1], 0)
        return self.theta_HN

    @property
    def masked(self) -> bool:
        """Whether documents or a window hide some keys from later queries."""
        return self.starts_BS is not None or self.window is not None

    @property
    def end(self) -> int:
        """The position of the last query, plus 1."""
        return self.query_offset + self.q_BHTE.shape[2]

    def query_rows(self) -> Tensor:
        """Return the index of the key at the position of each query, int64 [queries]."""
        return torch.arange(self.query_offset, self.end, device=self.q_BHTE.device)

    def query_starts(self) -> Tensor | None:
        """Return the position at which each query's document starts, [batch, queries].

        Return None if each sequence is one document.
        """
        return None if self.starts_BS is None else self.starts_BS[:, self.query_offset : self.end]

    def first_keys(self) -> Tensor | None:
        """Return the index of the first key that each query sees, int64 [batch or 1, queries].

        Return None if there are neither documents nor a window.
        """
        if not self.masked:
            return None
        first_BT = torch.zeros(1, 1, dtype=torch.int64, device=self.q_BHTE.device)
        # The indices never decrease along the sequence.
        if self.window is not None:
            first_BT = (self.query_rows() - self.window).clamp(min=0)[None]
        if (starts_BT := self.query_starts()) is not None:
            first_BT = first_BT.maximum(starts_BT.long())
        return first_BT

    def hidden(self, distance_TS: Tensor) -> Tensor:
        """Return a mask that is true where a query does not see a key.

        The mask is bool [batch or 1, 1, queries, keys].

        Args:
            distance_TS: The query-key distances [queries, keys]. Those of future keys are negative.
        """
        hidden_BHTS = (distance_TS < 0)[None, None]
        if (first_BT := self.first_keys()) is not None:
            key_S = torch.arange(distance_TS.shape[1], device=distance_TS.device)
            hidden_BHTS = hidden_BHTS | (key_S < first_BT[:, None, :, None])
        return hidden_BHTS

    def positions(self) -> Tensor:
        """Return the position of each query in its document, [batch or 1, queries]."""
        if self.positions_BT is not None:
            return self.positions_BT
        starts_BT = self.query_starts()
        return self.query_rows()[None] - (0 if starts_BT is None else starts_BT)

    def absolute_positions(self) -> Tensor:
        """Return the position of each query in the sequence, [batch or 1, queries]."""
        for positions_BT in (self.sequence_positions_BT, self.positions_BT):
            if positions_BT is not None:  # a caller may count positions in another way
                return positions_BT
        return self.query_rows()[None]

    def temperature_positions(self) -> Tensor:
        """Return the positions for which the temperature is computed, [batch or 1, queries]."""
        return self.positions() if self.pos.tempers_bias else self.absolute_positions()

    def bias(self, theta_HN: Tensor, distance_TS: Tensor) -> Tensor | None:
        """Return the bias of the logits [batch or 1, heads, queries, keys], or None if it is 0.

        Args:
            theta_HN: The embedding's parameters [heads, parameters].
            distance_TS: The query-key distances [queries, keys]. Negative distances are replaced by
                0.
        """
        d_1TS = distance_TS.clamp(min=0)[None]
        bias_HBTS = self.pos.bias_at(theta_HN, d_1TS, self.positions()[:, :, None])
        return None if bias_HBTS is None else bias_HBTS.transpose(0, 1)

    def lost(self, dtype: torch.dtype) -> Tensor | None:
        """Return how much the forget gate lowers each logit, or None without a forget gate.

        The result is [batch, heads, queries, keys] in `dtype`.
        """
        if (c_BHS := self.decay_BHS) is None:
            return None
        # c is a sum that may be large, so it is rounded after the subtraction
        c_BHT = c_BHS.index_select(2, self.query_rows())
        return (c_BHS[:, :, None] - c_BHT[..., None]).to(dtype)

    def with_null_key(self, logits_BHTS: Tensor) -> Tensor:
        """Return the logits, with one more column for the null key if there is an attention sink.

        In this column, each head has the logit of its sink.
        """
        if self.sink_H is None:
            return logits_BHTS
        null_H11 = self.sink_H.to(logits_BHTS.dtype)[:, None, None]
        return torch.cat((logits_BHTS, null_H11.expand(*logits_BHTS.shape[:3], 1)), dim=-1)


def lowered(call: Call, *, grouped: bool, tempered: bool = False) -> Call:
    """Return a simpler attention call that has the same result.

    Args:
        grouped: Whether the backend accepts k and v with fewer heads than q. If not, the heads of k
            and v are repeated.
        tempered: Whether the backend applies the embedding's temperature. If not, this function
            multiplies q by the temperature.
    """
    k_BKSE, v_BKSE, decay_BHS = call.k_BKSE, call.v_BKSE, call.decay_BHS
    # In the returned call, `sink_H` has the logits of the embedding's sink. k, v and the decay
    # end at the position of the last query. `pos` and `theta_HN` have only the distance kernel
    # left.
    group = call.q_BHTE.shape[1] // k_BKSE.shape[1]
    if call.end < k_BKSE.shape[2]:  # later keys may hold anything, even NaN, and NaN times 0 is NaN
        k_BKSE, v_BKSE = (x[:, :, : call.end] for x in (k_BKSE, v_BKSE))
        decay_BHS = None if decay_BHS is None else decay_BHS[:, :, : call.end]
    if group > 1 and not grouped:
        k_BKSE, v_BKSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
    if k_BKSE is not call.k_BKSE:
        call = replace(call, k_BKSE=k_BKSE, v_BKSE=v_BKSE, decay_BHS=decay_BHS)
    several = call.starts_BS is not None and call.positions_BT is None
    several = several or call.sequence_positions_BT is not None
    if call.pos.reads_position and several and not call.pos.tempers_bias:
        tempered = False  # biases and the temperature then count from different positions
    if call.pos.has("temperature") and not tempered:
        # in 16 bits, this rounding of q makes theta's gradient wrong by several percent
        call = replace(call, q_BHTE=_tempered(call))
    if call.pos.has("sink"):
        call = replace(call, sink_H=call.pos.sink(call.theta))
    pos, theta_HN = call.pos.kernel_part(call.theta_HN, tempered=tempered)
    return call if pos is call.pos else replace(call, pos=pos, theta_HN=theta_HN)


def _tempered(call: Call) -> Tensor:
    """Return the queries, each multiplied by the embedding's temperature at its position."""
    q_BHTE = call.q_BHTE
    t_HBT = call.pos.temperature(call.theta, call.temperature_positions())
    return (q_BHTE * t_HBT.transpose(0, 1)[..., None]).to(q_BHTE.dtype)


def document_starts(ended_BS: Tensor) -> Tensor:
    """Return, for each token, the position at which its document starts, int64 [batch, tokens].

    Args:
        ended_BS: True at the last token of each document, bool [batch, tokens].
    """
    is_first_BS = F.pad(ended_BS[:, :-1], (1, 0))
    position_S = torch.arange(is_first_BS.shape[1], device=is_first_BS.device)
    return torch.where(is_first_BS, position_S, 0).cummax(1).values


def starts_from_ids(ids_BS: Tensor) -> Tensor:
    """Return the position of the first token of each token's document, int64 [batch, tokens].

    Args:
        ids_BS: The id of the document to which each token belongs [batch, tokens].

    Raises:
        ValueError: `ids_BS` does not have two dimensions.
    """
    if ids_BS.dim() != 2:
        raise ValueError(f"ids must be [batch, tokens], not {list(ids_BS.shape)}: write ids[None]")
    return document_starts(F.pad(ids_BS[:, 1:] != ids_BS[:, :-1], (0, 1)))
