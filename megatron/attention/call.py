"""Hold the inputs of one attention call, and simplify them for a backend.

For example, most backends do not apply a temperature, because `lowered` multiplies it into q.
Exports contain this file (see `megatron.hub.bundle`).

Legend: see `choice`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positional.base import PositionalEmbedding


@dataclass(frozen=True)
class Call:
    """The inputs of one attention call. `choice.AttentionFn.__call__` describes most of them.

    Attributes:
        sink_H: The logit of each head's null key, if there is a sink. `lowered` computes it.
        return_lse: Whether a backend returns (output, lse); see `backend.Backend`.
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
    sink_H: Tensor | None = None
    return_lse: bool = False

    @property
    def has_kernel(self) -> bool:
        """Whether the positional embedding has a distance kernel."""
        return self.pos.has("distance")

    @property
    def theta(self) -> Tensor:
        """The embedding's parameters theta [heads, columns]. The embedding must have some."""
        assert self.theta_HN is not None
        return self.theta_HN

    @property
    def masked(self) -> bool:
        """Whether documents or a window limit the keys that a query sees."""
        return self.starts_BS is not None or self.window is not None

    @property
    def end(self) -> int:
        """The position of the last query, plus 1."""
        return self.query_offset + self.q_BHTE.shape[2]

    def query_rows(self) -> Tensor:
        """Return the index of each query's own key, int64 [T]."""
        return torch.arange(self.query_offset, self.end, device=self.q_BHTE.device)

    def query_starts(self) -> Tensor | None:
        """Return the start of each query's document [B, T], or None if there are no documents."""
        if self.starts_BS is None:
            return None
        return self.starts_BS[:, self.query_offset : self.end]

    def first_keys(self) -> Tensor | None:
        """Return the index of the first key that each query sees, int64 [B or 1, T].

        The indices never decrease along the sequence. The result is None if there are neither
        documents nor a window.
        """
        if not self.masked:
            return None
        first_BT = torch.zeros(1, 1, dtype=torch.int64, device=self.q_BHTE.device)
        if self.window is not None:
            first_BT = (self.query_rows() - self.window).clamp(min=0)[None]
        if (starts_BT := self.query_starts()) is not None:
            first_BT = first_BT.maximum(starts_BT.long())
        return first_BT

    def hidden(self, distance_TS: Tensor) -> Tensor:
        """Return a mask that is true where a query does not see a key, bool [B or 1, 1, T, S].

        `distance_TS` holds the query-key distances. They are negative for future keys.
        """
        hidden_BHTS = (distance_TS < 0)[None, None]
        if (first_BT := self.first_keys()) is not None:
            key_S = torch.arange(distance_TS.shape[1], device=distance_TS.device)
            hidden_BHTS = hidden_BHTS | (key_S < first_BT[:, None, :, None])
        return hidden_BHTS

    def positions(self) -> Tensor:
        """Return the position of each query in its document, [B or 1, T]."""
        starts_BT = self.query_starts()
        if self.positions_BT is not None or starts_BT is None:
            return self.absolute_positions()
        return self.absolute_positions() - starts_BT

    def absolute_positions(self) -> Tensor:
        """Return the positions of the queries, [B or 1, T].

        These are `positions_BT` if given. Otherwise, positions are counted from the first key.
        """
        if self.positions_BT is not None:
            return self.positions_BT
        return self.query_rows()[None]

    def temperature_positions(self) -> Tensor:
        """Return the positions of queries, [B or 1, T], from which temperatures are computed."""
        return self.positions() if self.pos.tempers_bias else self.absolute_positions()

    def bias(self, theta_HN: Tensor, distance_TS: Tensor) -> Tensor | None:
        """Return the distance kernel's bias [B or 1, H, T, S], or None if it is 0 everywhere."""
        d_1TS = distance_TS.clamp(min=0)[None]
        bias_HBTS = self.pos.bias_at(theta_HN, d_1TS, self.positions()[:, :, None])
        return None if bias_HBTS is None else bias_HBTS.transpose(0, 1)

    def lost(self, dtype: torch.dtype) -> Tensor | None:
        """Return c_j - c_i for query i and key j, or None if there is no decay c.

        The result is [B, H, T, S] in `dtype`. Attention subtracts it from the logits.
        """
        if self.decay_BHS is None:
            return None
        c_BHS = self.decay_BHS
        # c is a sum that may be large, so it is rounded after the subtraction
        c_BHT = c_BHS.index_select(2, self.query_rows())
        return (c_BHS[:, :, None] - c_BHT[..., None]).to(dtype)

    def with_null_key(self, logits_BHTS: Tensor) -> Tensor:
        """Return the logits, with the sink's logit as one more column if there is a sink."""
        if self.sink_H is None:
            return logits_BHTS
        null_H11 = self.sink_H.to(logits_BHTS.dtype)[:, None, None]
        return torch.cat((logits_BHTS, null_H11.expand(*logits_BHTS.shape[:3], 1)), dim=-1)


def lowered(call: Call, *, grouped: bool, tempered: bool = False) -> Call:
    """Return an equivalent call that is simpler for a backend to compute.

    The returned call has these properties. The embedding's temperature has been multiplied into q.
    `sink_H` holds the logits of the embedding's sink. Keys after the last query's position have
    been cut off. `pos` is the distance kernel alone, and `theta_HN` holds only its parameters.

    Args:
        grouped: Whether k and v may keep fewer heads than q. Otherwise the heads of k and v are
            repeated.
        tempered: Whether the temperature stays a part of `pos`, and q stays as it is.
    """
    k_BKSE, v_BKSE, decay_BHS = call.k_BKSE, call.v_BKSE, call.decay_BHS
    group = call.q_BHTE.shape[1] // k_BKSE.shape[1]
    if call.end < k_BKSE.shape[2]:  # later keys may hold anything, even NaN, and NaN times 0 is NaN
        k_BKSE, v_BKSE = (x[:, :, : call.end] for x in (k_BKSE, v_BKSE))
        decay_BHS = None if decay_BHS is None else decay_BHS[:, :, : call.end]
    if group > 1 and not grouped:
        k_BKSE, v_BKSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
    if k_BKSE is not call.k_BKSE:
        call = replace(call, k_BKSE=k_BKSE, v_BKSE=v_BKSE, decay_BHS=decay_BHS)
    several = call.starts_BS is not None and call.positions_BT is None
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
    """Return the queries, each multiplied by the temperature of its position."""
    q_BHTE = call.q_BHTE
    t_HBT = call.pos.temperature(call.theta, call.temperature_positions())
    return (q_BHTE * t_HBT.transpose(0, 1)[..., None]).to(q_BHTE.dtype)


def document_starts(ended_BS: Tensor) -> Tensor:
    """Return, for each token, the position of its document's first token, int64 [B, S].

    Args:
        ended_BS: Whether each token is the last of its document.
    """
    return _starts(ended_BS[:, :-1])


def starts_from_ids(ids_BS: Tensor) -> Tensor:
    """Return, for each token, the position of its document's first token, int64 [B, S].

    Args:
        ids_BS: A number for each token. Neighbours with equal numbers belong to one document.

    Raises:
        ValueError: `ids_BS` is not [batch, tokens].
    """
    if ids_BS.dim() != 2:
        raise ValueError(f"ids must be [batch, tokens], not {list(ids_BS.shape)}: write ids[None]")
    return _starts(ids_BS[:, 1:] != ids_BS[:, :-1])


def _starts(changes_BR: Tensor) -> Tensor:
    """Return, for each token, the position of its document's first token.

    `changes_BR[:, i]` says whether token i + 1 is the first of a document.
    """
    is_first_BS = F.pad(changes_BR, (1, 0))
    position_S = torch.arange(is_first_BS.shape[1], device=is_first_BS.device)
    return torch.where(is_first_BS, position_S, 0).cummax(1).values
