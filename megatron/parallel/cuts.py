"""How a parameter is cut over the tensor-parallel ranks.

A parameter that can be cut carries its `Cut`; one without is whole on every rank. Initial values
are drawn whole and then cut, and checkpoints are joined again, so a layout changes no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.groups import TensorGroup


@dataclass(frozen=True)
class Cut:
    """Equal slices of dimension `dim`, which holds `blocks` tensors one after the other.

    Each block is cut by itself: a gated MLP stacks value and gate, and every rank needs the same
    rows of both.
    """

    dim: int
    blocks: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Slice `rank` of `size` (a copy)."""
        blocks = whole.chunk(self.blocks, self.dim)
        parts = [block.chunk(size, self.dim)[rank] for block in blocks]
        return torch.cat(parts, self.dim).contiguous()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the slices of all ranks, in order."""
        chunks = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([each[b] for b in range(self.blocks) for each in chunks], self.dim)

    def whole_shape(self, part: torch.Size, size: int) -> torch.Size:
        """Shape of the whole tensor, from a slice's."""
        shape = list(part)
        shape[self.dim] *= size
        return torch.Size(shape)


def mark_cut(param: nn.Parameter, cut: Cut, tp: TensorGroup) -> None:
    """Note on `param` how it is cut, or, in a group of one, how it would be."""
    param.cut, param.cut_rank, param.cut_size = cut, tp.rank, tp.size
    if tp.size > 1:  # what DeepSpeed reads when it adds up the gradient's norm
        param.model_parallel = param.tensor_model_parallel = True


def cut_of(param: Tensor) -> Cut | None:
    """The parameter's cut; None where every rank holds it whole."""
    return getattr(param, "cut", None)


def whole_shape(param: Tensor) -> torch.Size:
    """Shape of the parameter before it was cut."""
    cut = cut_of(param)
    return param.shape if cut is None else cut.whole_shape(param.shape, param.cut_size)


def own_part(param: Tensor, whole: Tensor) -> Tensor:
    """What of `whole` belongs into `param`."""
    cut = cut_of(param)
    return whole if cut is None else cut.part(whole, param.cut_rank, param.cut_size)


def whole_of(param: Tensor, part: Tensor, tp: TensorGroup) -> Tensor:
    """The whole of what each rank of `tp` has a `part` of, cut as `param` is (a collective)."""
    cut = cut_of(param)
    return part if cut is None or tp.size == 1 else cut.join(tp.gather(part))


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Parameter name -> cut, for those that are cut."""
    found = {name: cut_of(param) for name, param in model.named_parameters()}
    return {name: cut for name, cut in found.items() if cut is not None}
