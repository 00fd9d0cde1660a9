"""Give tensors of this project's model the names and shapes of the published code.

The published pipeline names a parameter by the position of its layer, for example
`0.word_embeddings.weight`. A word embedding tied to the output layer is named
`tied_modules.embed.word_embeddings.weight` instead. Both names are accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.engine.neox import layout
from megatron.engine.neox.shape import Shape
from megatron.model import GPT
from megatron.parallel.sharding import unsharded

TIED = "tied_modules.embed."


def position_name(name: str) -> str:
    """Return a published parameter name in the form that begins with its layer's position.

    The name of a tied word embedding (`tied_modules.embed.*`) becomes `0.*`. Other names already
    begin with their position and are returned unchanged.
    """
    return f"0.{name.removeprefix(TIED)}" if name.startswith(TIED) else name


def gradients(model: GPT) -> dict[str, Tensor]:
    """Return a dict from published names (such as `0.word_embeddings.weight`) to gradients.

    The gradients have the published shapes. Parameters without a gradient are left out.
    """
    grads = {name: param.grad for name, param in model.named_parameters()}
    return published_tensors(model, {k: grad for k, grad in grads.items() if grad is not None})


def published_tensors(model: GPT, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors, and return a dict from published parameter name to full tensor.

    Args:
        model: The model whose parameters the tensors belong to.
        tensors: Maps names of the model's parameters to tensors of the same shapes, such as
            gradients or the parameters themselves.
    """
    out, params = {}, dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name == "embedding.theta":
            out |= positional_tensors(model, tensor)
        else:
            index, published = layout.published_place(name, model.shape.num_layers)
            out[f"{index}.{published}"] = unsharded(params[name], tensor, model.split.tp)
    return out


def positional_tensors(model: GPT, theta_HN: Tensor | None) -> dict[str, Tensor]:
    """Convert theta, or a tensor of the same shape, to the tensors that the published code stores.

    The published code stores T5's table as one tensor, and each column of KERPLE's theta as a
    tensor of its own. The returned tensors contain all heads, under names such as `2.bias_a`.

    Args:
        model: The model that has this theta.
        theta_HN: [heads of this rank, columns]. If it is None, the result is {}, or the fixed
            slopes if the embedding is `kerple_power_original`.

    Returns:
        A dict from published parameter name to tensor.
    """
    if theta_HN is None:
        if model.pos.name != "kerple_power_original":
            return {}
        device = next(model.parameters()).device
        _, theta_HN = model.embedding(torch.zeros(1, 1, dtype=torch.long, device=device))
        assert theta_HN is not None
        names = ["bias_a"]
    else:
        table = model.pos.name == "rpe"
        names = [layout.TABLE] if table else [p.name for p in model.pos.parameters]
    theta_HN = torch.cat(model.split.tp.gather(theta_HN.detach()))
    columns = layout.theta_columns(theta_HN, names)
    return {f"2.{name}": tensor for name, tensor in columns.items()}


def first_shards(tensors: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Shard each full tensor as in the published run, and return rank 0's shards."""
    return {
        name: layout.split(tensor, shape.rule(name.partition(".")[2]), shape.parts)[0]
        for name, tensor in tensors.items()
    }
