"""Fit the bias of a new positional embedding to the mean attention logits of an old one.

A trained model gets the new embedding instead of some old embeddings, which are dropped. The new
embedding adds a bias to the logits. The bias is a function of the query-key distance d. The old
model computes queries and keys on some text. For each layer and head, let

    y(d) = the mean logit of query i and key i - d over all i in the old model,
           minus the same mean without the rotary angles and biases of the dropped embeddings

The new bias b_theta(d) is fitted to y(d): its parameters theta minimise

    sum over d of n(d) (b_theta(d) + c - y(d))^2

where n(d) is the number of query-key pairs at distance d. The constant c is free, because the
softmax ignores a constant. If several layers share theta, y is the mean over these layers. The fit
ignores document boundaries and sliding windows.

The sums over i are correlations. A Fourier transform computes them in time T log T.

Legend: B sequences, H heads, T positions, E head size, D distances (D = T), N columns of theta.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.model import GPT
from megatron.model.block import SelfAttention
from megatron.model.changed_positions import ChangedPositions, terms_of_layer
from megatron.positional import PositionalEmbedding, PositionalError, bounds


def fit_added(old: GPT, change: ChangedPositions, inputs_BT: Tensor) -> dict[int, Tensor]:
    """Fit the parameters of an added positional embedding to attention logits of the old model.

    Args:
        old: The model with its old positional embeddings and all heads.
        change: The old and the new positional embeddings.
        inputs_BT: The text on which `old` computes queries and keys, [batch, tokens].

    Returns:
        A dict from the index of each fitted parameter to its values [heads].

    Raises:
        PositionalError: This change of positional embeddings cannot be fitted.
    """
    # The kernels of an added embedding are fitted to the logits of the dropped embeddings. The
    # index is that of the column of theta (the learned parameters of the new embedding).
    layers = [module for module in old.modules() if isinstance(module, SelfAttention)]
    measured: dict[int, tuple[PositionalEmbedding, list[Tensor]]] = {}

    def measure(attention: SelfAttention, args: tuple[Any, ...]) -> None:
        layer = layers.index(attention)
        before, after = (terms_of_layer(pos, layer) for pos in (change.old, change.new))
        added = [term for term in after if term not in before]
        dropped = [term for term in before if term not in after and term.kind != "none"]
        if not added and not dropped:
            return
        if len(added) != 1 or not dropped or not all(map(_fits, [*before, *after])):
            raise PositionalError(
                "retrofit_init: fit gives what a layer drops to one new term, and reads only "
                f"rotary and biases of the distance, not {change.old.name} -> {change.new.name}; "
                "write retrofit_init: gentle"
            )
        y_HD = mean_products(attention, change.old.of_layer(layer)[0], args[0])
        y_HD = y_HD - mean_products(attention, change.new.of_layer(layer)[0], args[0])
        d = torch.arange(y_HD.shape[1], device=y_HD.device)
        for term in dropped:
            if term.kind == "distance":
                bias_HD = term.bias(args[1][:, before[term]].double(), d)
                y_HD = y_HD if bias_HD is None else y_HD + bias_HD
        measured.setdefault(after[added[0]].start, (added[0], []))[1].append(y_HD.cpu())

    hooks = [layer.register_forward_pre_hook(measure) for layer in layers]  # type: ignore[arg-type]
    old(inputs_BT)
    for hook in hooks:
        hook.remove()
    fitted: dict[int, Tensor] = {}
    for first, (term, values) in measured.items():
        if term.trained_parameters:
            theta_HN = fit(term, torch.stack(values).mean(0))
            fitted |= dict(enumerate(theta_HN.unbind(1), first))
    return fitted


def fit(term: PositionalEmbedding, y_HD: Tensor) -> Tensor:
    """Fit the bias of `term` to `y_HD` by least squares, and return the fitted parameters.

    The result has the shape [heads, parameters per head].

    Args:
        term: The positional embedding whose parameters are fitted.
        y_HD: The wanted bias of each head at each distance, up to a constant per head.
    """
    from scipy.optimize import least_squares  # a fifth of a second for a job that fits nothing

    d = torch.arange(y_HD.shape[1])
    count_D = np.arange(len(d), 0, -1)
    start_HN = term.initial_theta(len(y_HD), torch.Generator()).double()
    for n, parameter in enumerate(term.parameters):
        start_HN[:, n] = start_HN[:, n] if parameter.gentle is None else parameter.gentle
    rows = []
    for start_N, y_D in zip(start_HN, y_HD, strict=True):

        def gap(theta_N: np.ndarray, y_D: Tensor = y_D) -> np.ndarray:
            bias_HD = term.bias(torch.from_numpy(theta_N)[None], d)
            gap_D = (0.0 if bias_HD is None else bias_HD[0]) - y_D
            return (gap_D - np.average(gap_D, weights=count_D)).numpy() * np.sqrt(count_D)

        limits = [each.double().numpy() for each in bounds(term.parameters)]
        rows.append(least_squares(gap, start_N, bounds=limits, xtol=1e-12, ftol=1e-12).x)
    return torch.from_numpy(np.stack(rows))


def mean_products(attention: SelfAttention, pos: PositionalEmbedding, x_BTD: Tensor) -> Tensor:
    """Return the mean scaled dot product of query and key at each distance.

    The result is fp64 [heads, distances]. The scale is 1 / sqrt(head size). These products are the
    attention logits without the biases of positional embeddings.

    Args:
        attention: The layer that computes queries and keys.
        pos: The embedding that rotates queries and keys.
        x_BTD: The input of the attention layer, [batch, positions, features].
    """
    # At distance d, this is the mean of (q_i . k_(i-d)) / sqrt(head size) over all queries i.
    s, length = attention.shape, x_BTD.shape[1]
    q_BHTE, k_BHTE, _ = attention.queries_keys_values(x_BTD)
    pair = pos.rotate(
        q_BHTE.double(), k_BHTE.double(), rotary_ndims=s.rotary_ndims, base=s.rotary_base
    )
    q_BHFE, k_BHFE = (torch.fft.rfft(x, 2 * length, dim=2) for x in pair)
    product_BHF = (q_BHFE * k_BHFE.repeat_interleave(s.group, dim=1).conj()).sum(-1)
    sum_HD = torch.fft.irfft(product_BHF, 2 * length).mean(0)[:, :length]
    return sum_HD / torch.arange(length, 0, -1, device=sum_HD.device) / math.sqrt(s.head_size)


def _fits(term: PositionalEmbedding) -> bool:
    weighs = type(term).weight is not PositionalEmbedding.weight
    return term.kind in ("rotary", "distance", "none") and not (weighs or term.reads_position)
