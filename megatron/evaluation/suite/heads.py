"""Describe the attention of each head: share of the first token, entropy, attention by distance.

p_ij is the attention of query i to key j, for the last queries i of each sequence:

    first   = mean_i p_i0 + (1 - sum_j p_ij)      the second term is the mass of a sink's null key
    entropy = mean_i -sum_j p_ij ln p_ij          [nats]

A head is collapsed if more than `COLLAPSED` of its attention is on the first token and the null
key. The first token and the null key are the same for each query of a sequence, so a collapsed head
provides no information about the text.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from megatron.attention.call import Call
from megatron.attention.choice import computed, named
from megatron.engine.training.batches import on_device
from megatron.evaluation.suite.intervals import mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.model.block import SelfAttention

COLLAPSED, SHARE = 0.9, "share of the attention"
SEQUENCES, LONGEST, QUERIES = 8, 4096, 128
"""The most sequences, tokens of a sequence, and queries (the last ones) that are read."""


@torch.no_grad()
def heads(subject: Subject, sample: Sample) -> list[Measure]:
    """Measure which tokens each head attends to.

    Return one measure of all heads, and then one measure for each layer.
    """
    # The list is empty if the model has no attention layers of this project.
    layers = [each for each in subject.model.modules() if isinstance(each, SelfAttention)]
    if not layers:
        return []
    chosen = np.unique(np.linspace(0, len(sample.documents) - 1, SEQUENCES).astype(int))
    found: list[list[Tensor]] = [[] for _ in layers]
    before = [layer.attend for layer in layers]
    try:
        for layer, attend, numbers in zip(layers, before, found, strict=True):
            vars(layer)["attend"] = partial(_watch, attend, numbers)
        for tokens in sample.sequences_nT[chosen, : min(sample.longest, LONGEST)]:
            subject.model(on_device(tokens[None], subject.groups.device))
    finally:
        for layer, attend in zip(layers, before, strict=True):
            vars(layer)["attend"] = attend
    by_layer = [torch.stack(each).cpu().numpy() for each in found]  # [sequences, heads, numbers]
    documents = sample.documents[chosen]
    return [_summary(by_layer, documents), *map(partial(_layer, documents), by_layer, count())]


def _summary(by_layer: list[np.ndarray], documents: np.ndarray) -> Measure:
    rows = []
    for layer, numbers_nHX in enumerate(by_layer):
        for head, numbers_nX in enumerate(numbers_nHX.swapaxes(0, 1)):
            first = mean_of(numbers_nX[:, :1], documents)
            collapsed = "yes" if first.value > COLLAPSED else "no"
            also = {"entropy": float(numbers_nX[:, 1].mean()), "collapsed": collapsed}
            rows.append(Row({"layer": layer, "head": head}, first, also))
    share = sum(row.also["collapsed"] == "yes" for row in rows) / len(rows)
    says = f"{share:.0%} of the {len(rows)} heads are collapsed: more than {COLLAPSED:.0%} of "
    says += "their attention is on the first token or a null key."
    return Measure("heads", "Attention on the first token", SHARE, says, rows, share, drawn=False)


def _layer(documents: np.ndarray, numbers_nHX: np.ndarray, layer: int) -> Measure:
    """Return the measure of one layer: the share of attention at each distance, for each head.

    Args:
        documents: The document of each sequence, [n].
        numbers_nHX: The statistics that `_watch` collects for each sequence and head,
            [n, heads, 2 + bins].
        layer: The index of the layer.
    """
    # The distance is the number of tokens back, where the query's own token is 1.
    rows = [
        Row({"tokens_back": 2**place, "head": head}, mean_of(mass_nD[:, [place]], documents))
        for head, mass_nD in enumerate(numbers_nHX[:, :, 2:].swapaxes(0, 1))
        for place in range(mass_nD.shape[1])
    ]
    title, says = f"Attention by distance, layer {layer}", "A bin reaches to the next one's start."
    return Measure(f"heads_layer{layer}", title, SHARE, says, rows)


def _watch(attend: Callable[[Call], Tensor], numbers: list[Tensor], call: Call) -> Tensor:
    """Call the attention function `attend`, and append statistics of its attention to `numbers`.

    The statistics are a tensor [heads, 2 + bins]: the attention to the first token and to a sink's
    null key, the entropy in nats, and the attention in each bin of distances.

    Args:
        call: The arguments of the attention function, for one sequence.

    Returns:
        The output of `attend`.
    """
    q_BHTE, k_BKSE, positions_BT = call.q_BHTE, call.k_BKSE, call.positions_BT
    size = k_BKSE.shape[2]
    start = max(0, size - QUERIES)
    # Attention to values that are the unit vectors gives the probabilities themselves.
    eye_BKSS = torch.eye(size, device=q_BHTE.device).expand(1, k_BKSE.shape[1], size, size)
    last = replace(
        call, q_BHTE=q_BHTE[:, :, start:].float(), k_BKSE=k_BKSE.float(), v_BKSE=eye_BKSS,
        query_offset=start, dropout_p=0.0,
        positions_BT=None if positions_BT is None else positions_BT[:, start:],
    )  # fmt: skip
    p_HTS = computed(named("eager", call.pos), last)[0]
    first_H = (p_HTS[..., 0] + 1 - p_HTS.sum(-1)).mean(-1)
    keys_S = torch.arange(size, device=p_HTS.device)
    back_TS = (torch.arange(start, size, device=p_HTS.device)[:, None] - keys_S + 1).clamp(min=1)
    bin_TS = back_TS.double().log2().floor()
    mass = [(p_HTS * (bin_TS == place)).sum(-1).mean(-1) for place in range(size.bit_length())]
    numbers.append(
        torch.stack((first_H, torch.special.entr(p_HTS).sum(-1).mean(-1), *mass), -1).double()
    )
    return attend(call)
