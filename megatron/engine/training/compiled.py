"""Compile the model with `torch.compile`, and count the compiled graphs.

Two modes of `torch.compile` use CUDA graphs. A CUDA graph records the GPU's work in a forward or
backward pass, and repeats this work with one launch. The graph writes its results (gradients, too)
into its own memory. Each launch overwrites the results of the previous launch.
"""

import torch
from torch import nn

from megatron.config.choices import MODES_WITH_CUDA_GRAPHS


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile `model` with `torch.compile`, once for each shape of its inputs.

    Args:
        mode: The mode of `torch.compile`.
    """
    model.compile(dynamic=False, mode=mode)
    if mode in MODES_WITH_CUDA_GRAPHS:
        # Each gradient is copied out of the graph's memory, which the next micro-batch overwrites
        # (pytorch issues 96693 and 169545).
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.clone)


class Compilations:
    """Counts the graphs that `torch.compile` makes in this process.

    Args:
        asked: Whether the model is compiled. If false, no graphs are counted.
    """

    def __init__(self, asked: bool):
        self._asked = asked
        self._first: int | None = None

    def metrics(self) -> dict[str, int]:
        """Return three counts: of all graphs, of graphs made after the first step, and of skips.

        Call this method after each step: the first call records how many graphs the first step
        made. A skip is a forward or backward pass that torch could not record in a CUDA graph. If
        the model is not compiled, the result is empty.
        """
        if not self._asked:
            return {}
        from torch._dynamo.utils import counters

        graphs = counters["stats"]["unique_graphs"]
        self._first = graphs if self._first is None else self._first
        return {
            "compile/graphs": graphs,
            "compile/recompiles": graphs - self._first,
            "compile/cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }
