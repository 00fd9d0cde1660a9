"""Confine NaN and infinity to the outputs of those queries that see them.

The softmax weight of a hidden key is 0. The key's value is still multiplied by this weight, and 0
times NaN is NaN. A backend that adds -inf to the scores of hidden keys has the same fault, because
NaN - inf is NaN. So a NaN in one document could reach another document in the same tile of scores.

Legend: see `choice`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.call import Call
from megatron.positional.hidden_layer import is_transformed


def has_values(x: Tensor) -> bool:
    """Return whether the values of a tensor can be read.

    They cannot be read inside `torch.compile` or torch.func, or on the device meta.
    """
    return not (torch.compiler.is_compiling() or is_transformed() or x.is_meta)


def _clean(x: Tensor, bad: Tensor, lost: Tensor) -> Tensor:
    """Return `x` with 0 where `bad` is true. The gradient of `x` is NaN where `lost` is true."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda grad: grad.masked_fill(lost, torch.nan))
    return x.masked_fill(bad, 0.0)


def contained(run: Callable[[Call], Any], call: Call) -> Any:
    """Compute attention so that NaN and infinity reach only the queries that see them."""
    found = run(call)
    out_BHTE = found[0] if call.return_lse else found
    wide = torch.promote_types(out_BHTE.dtype, torch.float32)
    on_cpu = out_BHTE.device.type == "cpu" and has_values(out_BHTE)
    read = [out_BHTE, call.k_BKSE] if out_BHTE.requires_grad else [out_BHTE]  # q's gradient reads k
    if not on_cpu or all(math.isfinite(x.sum(dtype=wide).item()) for x in read):
        return found  # the usual case, which costs only the sums
    # Each query that sees such a number gets the output NaN, and the gradients of its inputs
    # become NaN. All other outputs are exact.
    clean, bad_BHT = _cleaned(call)
    found = run(clean)
    if not call.return_lse:
        return found.masked_fill(bad_BHT[..., None], torch.nan)
    masks = bad_BHT[..., None], bad_BHT
    return tuple(x.masked_fill(mask, torch.nan) for x, mask in zip(found, masks, strict=True))


def _cleaned(call: Call) -> tuple[Call, Tensor]:
    """Return a call with zeros instead of NaN and infinity, and a mask of affected queries.

    A query is affected if it contains NaN or infinity, or if it sees a key, a value or a decay that
    contains NaN or infinity. The mask is bool [batch, heads, queries].
    """
    q_BHTE, k_BKSE, decay_BHS = call.q_BHTE, call.k_BKSE, call.decay_BHS
    key_heads, keys = k_BKSE.shape[1:3]
    bad_BKS = ~(k_BKSE.isfinite() & call.v_BKSE.isfinite()).all(-1)
    bad_BHS = bad_BKS.repeat_interleave(q_BHTE.shape[1] // key_heads, 1)
    if decay_BHS is not None:
        bad_BHS = bad_BHS | ~decay_BHS.isfinite()
    bad_BHT = ~q_BHTE.isfinite().all(-1)
    first_BT = call.first_keys()
    first_BHT = torch.zeros_like(bad_BHT, dtype=torch.int64)
    first_BHT += 0 if first_BT is None else first_BT[:, None]
    after = slice(call.query_offset + 1, call.end + 1)  # the key after each query's own key
    before_BHX = F.pad(bad_BHS.cumsum(-1), (1, 0))
    bad_BHT |= before_BHX[..., after] > before_BHX.gather(-1, first_BHT)
    changes_BHX = torch.zeros_like(before_BHX).scatter_add_(-1, first_BHT, bad_BHT.long())
    changes_BHX[..., after] -= bad_BHT.long()
    lost_BHS = changes_BHX[..., :keys].cumsum(-1) > 0  # the keys that any bad row sees
    lost_BKS = lost_BHS.unflatten(1, (key_heads, -1)).any(2)
    bad_BKS1, lost_BKS1, bad_BHT1 = bad_BKS[..., None], lost_BKS[..., None], bad_BHT[..., None]
    masks = {
        "q_BHTE": (bad_BHT1, bad_BHT1),
        "k_BKSE": (bad_BKS1, lost_BKS1),
        "v_BKSE": (bad_BKS1, lost_BKS1),
    }
    if call.theta_HN is not None:
        masks["theta_HN"] = torch.tensor(False), bad_BHT1.any(2).any(0)
    if decay_BHS is not None:
        masks["decay_BHS"] = ~decay_BHS.isfinite(), lost_BHS
    clean = {name: _clean(getattr(call, name), *both) for name, both in masks.items()}
    return replace(call, **clean), bad_BHT
