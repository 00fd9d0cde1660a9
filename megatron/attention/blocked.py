"""Compute causal attention over blocks of query rows, with exact gradients and no quadratic buffer.

    S = scale (Q K^T) w + b, masked          P = softmax(S)          O = P V
    dV = P^T dO        dS = P (dO V^T - rowsum(P dO V^T))        dX = dS w   (X = scale Q K^T)
    dQ = scale dX K    dK = scale dX^T Q
    db(d) = sum of dS over all pairs at distance d     dw(d) = sum of dS X over the same pairs

Here dX, dV and so on are the gradients of the loss with respect to X, V and so on. b and w are the
bias and the factor of a distance kernel, which depend on the query-key distance d.
`tiled.decay_and_sink` has the formulas of the decay and the sink.

This backend is written in pure torch, for CPUs. It spends nearly all of its time in matrix
products. It does not compute scores of keys after a block's last query. The embedding's formula
computes b and w before the call, as vectors over distances in at least fp32. Therefore autograd
propagates db and dw to the kernel's parameters. If b also depends on the query's position, b is
computed tile by tile (`tiled.row_bias`). Queries are in reversed order (`tiled.toeplitz` explains
why). With a window, b is -inf at distances longer than the window. A block skips all keys that the
window hides from each of its queries. It also skips keys of documents that end before its queries.

In addition to the results, this backend needs memory for contiguous copies of the inputs, and for
buffers of the size of one tile's scores (see `tiled.tiles`). The forward pass needs one buffer, or
two with a factor w or with dropout. The backward pass needs two buffers. It needs a further buffer
with a factor w, and a further buffer with dropout or a sink. For long sequences, the backward pass
computes P again. For short sequences (see `blocked_call.KEPT_SHARE`), P is hardly larger than the
inputs. The forward pass then stores P, which saves a sixth of the time.

Legend: B batch, H heads, N = B H (flattened), T queries, S keys, E head size, R rows and n keys of
a tile, m pairs (sequence, head) of a tile. In this file, the T axis is in reversed order.

Caution: the last bits of the results depend on the number of threads, as for torch's matrix
products. With the same number of threads, the results are repeatable bit for bit.
"""

from typing import Any

import torch
from torch.compiler import is_compiling

from megatron.attention import operations
from megatron.attention.backend import Backend, wants_gradients
from megatron.attention.call import Call
from megatron.attention.eager import eager
from megatron.attention.tiled.blocked_function import arguments_of, run

# As `torch.compiler.disable`, which would import the compiler now. This does so when it is called.
_outside_of_graphs = torch._disable_dynamo(run)  # pyright: ignore[reportPrivateImportUsage]


def blocked(call: Call) -> Any:
    """Compute attention tile by tile, without storing all scores at once.

    Return the output [batch, heads, queries, head size], or (output, lse) if the call asks for lse.
    lse is the log-sum-exp of each softmax.
    """
    if call.q_BHTE.shape[2] == 1 and not wants_gradients(call) and not call.dropout_p:
        return eager(call)  # a single row needs neither blocks nor copies of the keys
    inputs, others = arguments_of(call)
    if is_compiling() and inputs[-2] is None:
        # without keeping P, whose size may depend on where documents start
        return operations.blocked(*inputs[:-2], *others[:3])
    return (_outside_of_graphs if is_compiling() else run)(inputs, others)


BACKEND = Backend("blocked", blocked, remark=lambda request: "no quadratic buffer", gives_lse=True)
