"""Cache compiled Triton kernels and their compile-time arguments, so that launches are fast.

A variant is a Triton kernel with its compile-time arguments. Triton compiles a variant again if
certain properties of the run-time arguments change: dtypes, whether addresses and strides are
multiples of 16, whether strides and numbers are 1, and whether whole numbers need more than 32
bits. At each launch, Triton examines these properties of all arguments. This takes longer than the
launch itself.

With `SWITCHES["cached"]`, a variant has a dict of compiled kernels. The keys are made of the
properties of the arguments. For arguments with a new key, Triton chooses the kernel, and the
variant stores it. For arguments with a known key, the variant launches the stored kernel. A key
contains the exact strides, and the addresses modulo 16. Therefore keys distinguish more cases than
Triton does. The current device and stream and Triton's launch hooks are looked up at each launch.
Other settings of Triton are read only at the first launch with a key. A launch allocates no memory,
and the host does not wait for the GPU. Therefore launches can be captured in a CUDA graph.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from triton.compiler import CompiledKernel

from megatron.kernels.backward import key_pass, query_pass
from megatron.kernels.decode import decode_pass, merge_pass
from megatron.kernels.device_functions import DeviceFunctions
from megatron.kernels.documents_sink_decay import TENSORS
from megatron.kernels.forward import forward_pass
from megatron.kernels.hidden_layer import hidden_pass
from megatron.kernels.tabulated import table_pass
from megatron.kernels.tile_sizes import Tile, padded

PASSES: dict[str, Any] = {"forward": forward_pass, "query": query_pass, "key": key_pass}
PASSES |= {"table": table_pass, "hidden": hidden_pass}
PASSES |= {"decode": decode_pass, "merge": merge_pass}

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options: products and sums may be fused, whatever Triton's default is."""

NUMBERS = ("heads", "group", "queries", "keys", "offset", "width", "scale", "threshold", "rescale")
"""The numeric arguments of all Triton kernels, in order."""

LARGEST = 4096
"""The largest number of variants, and of compiled kernels of each variant, that are kept.

At this number, all compiled kernels of the variant are forgotten."""

SWITCHES = {"cached": False}
"""Whether launches are cached, for the whole process; see `megatron.attention.cache_launches`."""


@dataclass
class Variant:
    """A Triton kernel with fixed compile-time arguments.

    Attributes:
        function: The Triton kernel.
        constants: The values of the compile-time arguments.
        options: The options of Triton's compiler.
        exact: One flag for each numeric argument: whether Triton may compile the kernel again for
            another value of this argument.
        compiled: The compiled kernels. A key describes the arguments' dtypes, strides and so on.
    """

    function: Any
    constants: Sequence[Any]
    options: dict[str, Any]
    exact: Sequence[bool]
    compiled: dict[tuple, Any] = field(default_factory=dict)

    def start(
        self, programs: tuple[int, int], pointers: Sequence[Any], strides: Sequence[int],
        numbers: Sequence[Any],
    ) -> None:  # fmt: skip
        """Start the Triton kernel on the current device and stream.

        Args:
            programs: The numbers of programs in the two dimensions of Triton's grid.
            pointers: The tensors. None stands for an optional tensor that is absent.
            strides: The strides of the tensors.
            numbers: The numeric arguments.
        """
        # `order` describes this order.
        arguments = (*pointers, *strides, *numbers, *self.constants)
        if not SWITCHES["cached"]:
            self.function[programs](*arguments, **self.options)
            return
        tensors = [None if x is None else (x.dtype, x.data_ptr() % 16) for x in pointers]
        # A number that is not exact matters only by whether it fits into 32 bits.
        values = [x if exact else x >> 31 for x, exact in zip(numbers, self.exact, strict=True)]
        key = (pointers[0].get_device(), *tensors, *strides, *values)
        compiled = self.compiled.get(key)
        if compiled is not None and not self.function.pre_run_hooks:
            compiled[*programs, 1](*arguments)
            return
        compiled = self.function[programs](*arguments, **self.options)
        if isinstance(compiled, CompiledKernel):  # Triton's interpreter compiles nothing
            if len(self.compiled) >= LARGEST:
                self.compiled.clear()
            self.compiled[key] = compiled


@lru_cache(maxsize=LARGEST)
def variant_of(
    which: str, functions: DeviceFunctions, tile: Tile, head_size: int, tensors: tuple[str, ...],
    *, dropout: bool, theta: bool,
) -> Variant:  # fmt: skip
    """Return a Triton kernel with its compile-time arguments.

    Args:
        which: The name of the Triton kernel.
        functions: The device functions that compute the positional embedding.
        tile: The tile sizes of the Triton kernel.
        head_size: The head size.
        tensors: The names of the kernel's tensors, without absent optional tensors.
        dropout: Whether there is dropout.
        theta: Whether the embedding's parameters need a gradient.
    """
    function = PASSES[which]
    values = constants(functions, tile, head_size, dropout=dropout, theta=theta, terms=tensors)
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS
    loose = getattr(function, "do_not_specialize", ())
    exact = [name not in loose for name in NUMBERS]
    return Variant(function, [values[name] for name in order(which)[2]], options, exact)


@lru_cache
def order(which: str) -> tuple[list[str], list[str], list[str]]:
    """Return three lists of argument names of a Triton kernel, in the order of its arguments.

    The lists are: all tensors, the tensors whose strides are also arguments, and the compile-time
    constants.

    Args:
        which: The name of the Triton kernel.
    """
    # All arguments in order: pointers `x_ptr`; strides `x_b`, `x_h` and `x_t` of the first three
    # of four dimensions; `NUMBERS`; compile-time arguments.
    names = PASSES[which].arg_names
    tensors = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
    strided = [name for name in tensors if f"{name}_b" in names]
    strides = [f"{name}_{axis}" for name in strided for axis in "bht"]
    first = [f"{name}_ptr" for name in tensors] + strides + list(NUMBERS)
    assert first == names[: len(first)]
    return tensors, strided, names[len(first) :]


def constants(
    functions: DeviceFunctions, tile: Tile, head_size: int,
    *, dropout: bool, theta: bool, terms: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of all Triton kernels, as a dict from name to value.

    Args:
        functions: The device functions that compute the positional embedding.
        tile: The tile sizes.
        head_size: The head size.
        dropout: Whether there is dropout.
        theta: Whether the embedding's parameters need a gradient.
        terms: The names of the optional tensors that are present.
    """
    # The pointer of an absent tensor is a compile-time argument, too.
    optional = {*TENSORS, "lost"}.difference(terms)
    values: dict[str, Any] = {f"{name}_ptr": None for name in optional}
    values |= {
        f"f_{x}": getattr(functions, x) for x in ("prepare", "evaluate", "zeros", "add", "finish")
    }
    values |= {"WEIGHTED": functions.weighted, "BIASED": functions.biased, "DROPOUT": dropout}
    values |= {"M": tile.M, "N": tile.N, "R": tile.M, "E": head_size, "P": padded(head_size)}
    values["LEARNS"] = theta or not {"sink", "high"}.isdisjoint(terms)
    values["THETA"] = functions.num_theta if theta else 0
    if functions.layer is not None:
        values |= {"FIRST": functions.layer.first, "K": functions.layer.width}
    return values
