"""Set the initial values of the weights.

On each rank, every full tensor is drawn in fp32 from a generator that depends only on the seed and
the parameter's name (`named_generator`). Each rank then keeps its slice.

    normal             N(0, std)
    scaled_normal      N(0, std / sqrt(2 L))
    small_init         N(0, sqrt(2 / (5 D)))               Nguyen & Salazar 2019
    wang_init          N(0, 2 / (L sqrt(D)))               Wang & Komatsuzaki 2021 (GPT-J)
    xavier_*, orthogonal, scaled_orthogonal (gain sqrt(2 / L))

Legend: N(mean, standard deviation), L layers, D hidden size, std = init_method_std.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn import init

from megatron.model.shape import GPTShape
from megatron.model.theta import is_theta
from megatron.parallel.rng import named_generator
from megatron.parallel.sharding import full_shape, local_slice


def draw(
    method: str, size: torch.Size, generator: torch.Generator, shape: GPTShape
) -> torch.Tensor:
    """Return an fp32 CPU tensor of initial values.

    Args:
        shape: The shape of the model. Some methods use its width, depth and `init_std`.
    """
    tensor = torch.empty(size, dtype=torch.float32)
    std, num_layers, hidden_size = shape.init_std, shape.num_layers, shape.block.hidden_size
    fills = {
        "normal": partial(init.normal_, std=std),
        "scaled_normal": partial(init.normal_, std=std / math.sqrt(2.0 * num_layers)),
        "small_init": partial(init.normal_, std=math.sqrt(2 / (5 * hidden_size))),
        "wang_init": partial(init.normal_, std=2 / num_layers / math.sqrt(hidden_size)),
        "xavier_uniform": init.xavier_uniform_,
        "xavier_normal": init.xavier_normal_,
        "orthogonal": partial(init.orthogonal_, gain=math.sqrt(2)),
        "scaled_orthogonal": partial(init.orthogonal_, gain=math.sqrt(2 / num_layers)),
    }
    return fills[method](tensor, generator=generator)


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, nn.Parameter]], shape: GPTShape, seed: int) -> None:
    """Set the initial values of a model's parameters.

    The values depend only on the seed, on the model's shape and on the names of the parameters. The
    positional embedding's parameters are not set here.
    """
    # The embedding layer sets theta. Parameters on the meta device have no values.
    for name, param in parameters:
        leaf = name.rsplit(".", 1)[-1]
        if is_theta(name) or param.is_meta:
            continue  # theta is drawn by the embedding itself
        if leaf == "bias":
            param.zero_()
        elif param.ndim == 1:
            param.fill_(1.0)  # norm weights
        else:
            residual = ".attention.dense." in name or ".mlp.dense_4h_to_h." in name
            method = shape.output_init_method if residual else shape.init_method
            value = draw(method, full_shape(param), named_generator(seed, name), shape)
            param.copy_(local_slice(param, value))
