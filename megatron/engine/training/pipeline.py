"""This rank's shard of the model, and the model's layers as a DeepSpeed pipeline.

`Pipeline` and `PipelineLosses` have the interface of the plain model and engine. Stages are split
between blocks. Every stage takes the same batches from the loop, so that all count the same
samples; only the first stage reads the tokens, and only the last one the targets.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.attention import AttentionFn
from megatron.config import Config
from megatron.engine.build import attention_of, build_model, positional_of, shape_of
from megatron.model import GPT, GPTShape
from megatron.model.embedding import THETA
from megatron.model.gpt import logits_group
from megatron.model.init import initialise
from megatron.model.pipeline import Layer, PipeBlock, pipeline_layers
from megatron.parallel.groups import Groups
from megatron.parallel.loss import token_losses
from megatron.positional import PositionalEmbedding

Batch = tuple[torch.Tensor, torch.Tensor]


class Pipeline(PipelineModule):
    """This rank's stage of the model, with the parameter names of `megatron.model.GPT`.

    Attributes:
        layer_names: names of all layers of the model. DeepSpeed's file names use their positions.
    """

    def __init__(
        self,
        shape: GPTShape,
        pos: PositionalEmbedding,
        attend: AttentionFn,
        seed: int,
        groups: Groups,
    ):
        layers = pipeline_layers(shape, pos, attend, seed, groups.model)
        topology = PipeModelDataParallelTopology(
            num_pp=groups.pipe_size, num_mp=groups.model.size, num_dp=groups.data_size
        )
        logits_tp = logits_group(shape, groups.model)

        def loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            """Mean loss for training; each target's loss [B, T] where gradients are off."""
            losses_BT = token_losses(logits_BTV, targets_BT, logits_tp)
            return losses_BT.mean() if torch.is_grad_enabled() else losses_BT

        self.layer_names = [layer.name for layer in layers]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its partition
            super().__init__(
                [_spec(layer) for layer in layers],
                topology=topology,
                loss_fn=loss,
                partition_method=f"type:{PipeBlock.__name__}",
            )
        self.shape, self.pos, self.attend = shape, pos, attend
        initialise(self.named_parameters(), shape, seed)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by the plain model's names: `layers.3.mlp...`, not `5.mlp...`."""
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            head, _, rest = name.partition(".")
            if head == "tied_modules":
                head, _, rest = rest.partition(".")
                yield f"{_from_key(head)}.{rest}", param
            else:
                yield f"{self.layer_names[int(head)]}.{rest}", param

    @torch.no_grad()  # autograd would record the broadcast of a parameter
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()

    @property
    def theta(self) -> nn.Parameter | None:
        """The kernel's parameters on the first stage; None on the others, or if none is learned."""
        return dict(self.named_parameters()).get(THETA)


Model = GPT | Pipeline


def build_local_shard(config: Config, vocab_size: int, groups: Groups) -> Model:
    """Build this rank's tensor-parallel shard of the model, or of its pipeline stage."""
    if groups.pipe_size == 1:
        device = groups.device.type
        return build_model(
            config, vocab_size, device_type=device, tp=groups.model, cp=groups.context
        )
    pos = positional_of(config)
    attend = attention_of(config, pos, groups.device.type)
    return Pipeline(shape_of(config, vocab_size), pos, attend, config.training.seed, groups)


def count_parameters(model: Model, groups: Groups) -> int:
    """Count the numbers in the full model, tied ones once."""
    local = sum(
        getattr(p, "ds_numel", p.numel()) * getattr(p, "shard_count", 1)
        for p in model.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
    )
    return sum(groups.gather_from_pipe(local))


def _spec(layer: Layer) -> LayerSpec:
    if not layer.tied:
        return LayerSpec(layer.build, **layer.args)
    return TiedLayerSpec(
        _key(layer.name), layer.build, forward_fn=layer.call, tied_weight_attr="weight",
        **layer.args,
    )  # fmt: skip


def _key(name: str) -> str:
    """A name without dots, which torch does not allow in a module's name."""
    return name.replace(".", "/")


def _from_key(key: str) -> str:
    return key.replace("/", ".")


def train_batch(engine: PipelineEngine, batches: Sequence[Batch]) -> torch.Tensor:
    """Take one optimizer step; return the mean loss of this pipeline, on all its stages."""
    engine.train_batch(iter(batches))
    return engine.dp_group_loss


class PipelineLosses:
    """(inputs [B, T], targets [B, T]) -> loss of each target [B, T] in nats, on every stage.

    B and T may change between calls: DeepSpeed's buffers are reset each time.
    """

    def __init__(self, engine: PipelineEngine, groups: Groups):
        self.engine, self.groups = engine, groups
        self.multiple = groups.model.size if groups.model.splits_sequence else 1
        assert groups.pipe is not None  # a job of one stage has no pipeline engine
        self.last = dist.get_global_rank(groups.pipe, groups.pipe_size - 1)

    @torch.no_grad()
    def __call__(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        engine = self.engine
        engine.reset_activation_shape()
        engine.total_loss = None  # DeepSpeed would add to the last call's loss, of another shape
        padding = (0, -inputs_BT.shape[1] % self.multiple)  # causal attention ignores it
        batch = iter([(F.pad(inputs_BT, padding), F.pad(targets_BT, padding))])
        found: Any = engine.eval_batch(
            batch,
            reduce_output=None,  # pyright: ignore[reportArgumentType]  returns a list of tensors
            bcast_loss=False,
            num_micro_batches=1,
        )
        engine.reset_activation_shape()
        if engine.is_last_stage():
            losses_BT = found[0][:, : inputs_BT.shape[1]].float().contiguous()
        else:
            losses_BT = torch.empty(inputs_BT.shape, device=self.groups.device)
        dist.broadcast(losses_BT, src=self.last, group=self.groups.pipe)
        return losses_BT
