"""Build this rank's part of the model: the plain model, or a stage of a DeepSpeed pipeline.

The plain model and a stage contain only this tensor-parallel rank's slices of the weights. The
class of a stage, `Pipeline`, has the same interface as the class of the plain model, `GPT`. Each
stage contains complete transformer blocks.
"""

import contextlib
import io
from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.config import Config
from megatron.engine.build import plan_of
from megatron.model import GPT, Plan
from megatron.model.init import initialise
from megatron.model.pipeline_layers import Layer, PipeBlock, pipeline_layers, pipeline_loss
from megatron.model.theta import SHARED_THETA, THETA
from megatron.parallel.groups import Groups


class Pipeline(PipelineModule):
    """This rank's pipeline stage of the model, with the parameter names of the unpipelined model.

    Attributes:
        layer_names: The names of all layers of the full model, in order.
    """

    # DeepSpeed's checkpoint files are numbered by the order of `layer_names`.

    def __init__(self, plan: Plan, groups: Groups):
        layers = pipeline_layers(plan)
        topology = PipeModelDataParallelTopology(
            num_pp=groups.pipe_size, num_mp=groups.model.size, num_dp=groups.data_size
        )
        self.layer_names = [layer.name for layer in layers]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its partition
            super().__init__(
                [_spec(layer) for layer in layers],
                topology=topology,
                loss_fn=pipeline_loss(plan),
                partition_method=f"type:{PipeBlock.__name__}",
            )
        self.shape, self.pos, self.attends = plan.shape, plan.pos, plan.attends
        initialise(self.named_parameters(), plan.shape, plan.seed)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters under the unpipelined model's names."""
        # DeepSpeed's own names begin with the position of the layer in the pipeline, such as
        # `5.mlp...`.
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            head, _, rest = name.partition(".")
            if head == "tied_modules":
                head, _, rest = rest.partition(".")
                yield f"{head.replace('/', '.')}.{rest}", param
            else:
                yield f"{self.layer_names[int(head)]}.{rest}", param

    @torch.no_grad()  # autograd would record the broadcast of a parameter
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()

    @property
    def theta_parts(self) -> tuple[nn.Parameter, ...]:
        """The positional embedding's learned parameters; empty if this stage does not store any."""
        # The first tensor is `theta` [this rank's heads, parameters per head]. If all heads share
        # some parameters, a second tensor [1, shared parameters] holds them.
        named = dict(self.named_parameters())
        return tuple(named[name] for name in (THETA, SHARED_THETA) if name in named)


Model = GPT | Pipeline


def build_local_model(
    config: Config, vocab_size: int, groups: Groups, eod: int | None = None
) -> Model:
    """Build this rank's shard of the config's model. In a pipeline, build this rank's stage.

    Args:
        vocab_size: The size of the tokenizer's vocabulary, before padding.
        eod: The id of the tokenizer's end-of-document token. It is needed if the config sets
            `reset_attention_mask`.
    """
    device, tp, cp = groups.device.type, groups.model, groups.context
    plan = plan_of(config, vocab_size, device_type=device, eod=eod, tp=tp, cp=cp)
    return GPT(plan) if groups.pipe_size == 1 else Pipeline(plan, groups)


def count_parameters(model: Model, groups: Groups) -> int:
    """Count the parameters of the full model over all ranks; tied weights count once.

    Every rank must call this function.
    """
    local = sum(
        getattr(p, "ds_numel", p.numel()) * getattr(p, "shard_count", 1)
        for p in model.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
    )
    return sum(groups.gather_from_pipe(local))


def _spec(layer: Layer) -> LayerSpec:
    if not layer.tied:
        return LayerSpec(layer.build, **layer.args)
    # Torch allows no dots in module names. `named_parameters` replaces the slashes again.
    return TiedLayerSpec(
        layer.name.replace(".", "/"), layer.build, forward_fn=layer.call,
        tied_weight_attr="weight", **layer.args,
    )  # fmt: skip
