"""Compute the memory and communication of one training step, from the model itself.

One rank's part of the model is built on the meta device, where tensors have no values. It trains
there by DeepSpeed's own schedule, with collectives that do nothing. So autograd stores the same
tensors as in the real step. There is no table of sizes that could become outdated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.utils import partition_balanced
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from megatron.config import Config
from megatron.engine.build import plan_of
from megatron.engine.model_shape import DTYPES
from megatron.model import GPT
from megatron.model.block import Block
from megatron.model.pipeline_layers import Layer, PipeBlock, pipeline_layers, pipeline_loss
from megatron.parallel.groups import TensorGroup
from megatron.parallel.loss import mean_loss
from megatron.plan.live_tensors import LiveBytes


class SilentGroup:
    """A stand-in for a process group. Its collectives do nothing, and `sent` counts their bytes.

    Attributes:
        sent: The bytes that a rank would have sent if the collectives were ring algorithms.
    """

    def __init__(self, size: int):
        self.size, self.sent = size, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._collective, name)

    def _collective(self, name: str, *arguments: Any) -> Any:
        rounds, most = 2 if name == "allreduce" else 1, max(map(_bytes, arguments))
        self.sent += rounds * most * (self.size - 1) // self.size
        return self  # as the handle of a collective that has ended

    def wait(self) -> bool:
        return True


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, Tensor))


@dataclass
class Step:
    """The memory and communication of one rank of a pipeline stage in a training step.

    Attributes:
        parameters: The number of elements of each parameter tensor of this rank.
        matrices: The number of elements of each matrix in the transformer blocks. Muon would train
            these matrices.
        kept: The bytes of the activations at the start of a backward pass. If the step has several
            backward passes, the largest of these values.
        moments: Pairs (complete, bytes), in the order of time. `complete` is the number of
            parameter elements with a complete gradient. `bytes` is the peak size of all tensors
            since the previous pair, without weights and gradients.
        left: The bytes of activations that still exist when the optimizer takes its step.
        sent: A dict from the name of a process group, such as `tensor`, to the bytes that this rank
            sends in the group per micro-batch.
        launches: The number of operations of a micro-batch that the CPU launches on a GPU.
    """

    parameters: list[int]
    matrices: list[int] = field(default_factory=list)
    kept: int = 0
    moments: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    launches: int = 0

    @property
    def size(self) -> int:
        """The number of this rank's parameters."""
        return sum(self.parameters)


def measured_step(config: Config, vocab_size: int, stage: int, device_type: str = "cuda") -> Step:
    """Return the memory and communication of a rank of the pipeline stage `stage`.

    The rank is the first of its tensor- and context-parallel groups.

    Args:
        vocab_size: The size of the tokenizer's vocabulary, before padding.
        device_type: "cuda" or "cpu", which decides the attention backend.
    """
    p, b, stages = config.parallel, config.batch, config.parallel.pipe_parallel_size
    sizes = {"tensor": p.model_parallel_size, "context": p.context_parallel_size}
    groups = {name: SilentGroup(size) for name, size in sizes.items()}
    tp, cp = (TensorGroup(cast(Any, group), 0, group.size) for group in groups.values())
    tp = replace(tp, sequence_parallel=p.sequence_parallel)
    plan = plan_of(config, vocab_size, device_type=device_type, eod=0, tp=tp, cp=cp)
    # As many micro-batches as fill the pipeline, and one more
    micro_batches = min(b.gradient_accumulation_steps, stages + 1) if stages > 1 else 1
    schedule = ds.TrainSchedule(micro_batches, stages, stage)
    with LiveBytes("meta") as live, torch.device("meta"):
        whole = Layer("", GPT, {"plan": plan}, lambda gpt, tokens: gpt(tokens, tokens))
        loss_of, layers, first = mean_loss, [whole], []
        if stages > 1:
            loss_of, layers = pipeline_loss(plan), pipeline_layers(plan)
            ends = partition_balanced([int(each.build is PipeBlock) for each in layers], stages)
            layers, first = layers[ends[stage] : ends[stage + 1]], layers[:2]
        shape = b.train_micro_batch_size_per_gpu, config.model.seq_length
        tokens, dtype = torch.zeros(shape, dtype=torch.int64), DTYPES[config.training.precision]
        with torch.no_grad():
            received = Layers(first).to(dtype)(tokens)
        model = Layers(layers, loss_of).to(dtype).train()
        blocks = [
            p for each in model.modules() if isinstance(each, Block) for p in each.parameters()
        ]
        matrices = [p.numel() for p in blocks if p.ndim == 2]
        step, outside = Step([x.numel() for x in model.parameters()], matrices), live.now
        live.restart()
        before = live.launches
        _train(step, live, model, schedule, tokens, received)
    step.moments = [(done, used - outside) for done, used in step.moments]
    step.kept, step.left = step.kept - outside, step.left - outside
    step.sent = {name: group.sent // micro_batches for name, group in groups.items()}
    step.launches = (live.launches - before) // micro_batches
    exchanges = (stage > 0) + (stage < stages - 1)
    step.sent["pipeline"] = exchanges * sum(map(_bytes, _floats(received)))
    return step


class Layers(nn.Module):
    """Layers in sequence, and a loss function. Each layer maps tensors to tensors."""

    def __init__(self, layers: list[Layer], loss: Callable[[Any, Tensor], Tensor] = mean_loss):
        super().__init__()
        self.specs, self.loss = layers, loss
        self.layers = nn.ModuleList(each.build(**each.args) for each in layers)

    def forward(self, flow: Any) -> Any:
        for layer, spec in zip(self.layers, self.specs, strict=True):
            flow = spec.call(layer, flow) if spec.call else layer(flow)
        return flow


def _train(
    step: Step,
    live: LiveBytes,
    model: Layers,
    schedule: ds.TrainSchedule,
    tokens: Tensor,
    received: Any,
) -> None:
    """Follow the schedule as DeepSpeed's engine does, and record in `step` what `live` counts.

    Args:
        received: What the stage receives from the stage before it.
    """
    # As in DeepSpeed, a stage has one buffer to send and receive hidden states, and copies each
    # tensor that it receives twice. The last stage frees old logits when new ones replace them.
    done, inputs, outputs, loss = 0, {}, {}, None
    exchanged = [torch.empty_like(x) for x in _floats(received)]

    def complete(param: nn.Parameter) -> None:
        nonlocal done
        step.moments.append((done, live.restart()))
        done += param.numel()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(complete)
    for command in chain.from_iterable(schedule):
        slot = getattr(command, "buffer_id", None)
        match command:
            case ds.LoadMicroBatch() if schedule.is_first_stage:
                inputs[slot] = tokens
            case ds.RecvActivation():
                inputs[slot] = tree_map(_received, received)
            case ds.ForwardPass():
                outputs[slot] = model(tree_map(torch.clone, inputs[slot]))
                if schedule.is_last_stage:
                    loss = model.loss(outputs[slot], tokens)
            case ds.BackwardPass():
                done, step.kept = 0, max(step.kept, live.now)
                step.moments.append((0, live.restart()))
                if loss is None:
                    _backward(_floats(outputs.pop(slot)), exchanged)
                else:
                    _backward([loss], [None])
                step.moments.append((done, live.restart()))
            case ds.SendGrad():
                del inputs[slot]
    step.left = live.now


def _received(x: Tensor) -> Tensor:
    return torch.empty_like(x, requires_grad=x.is_floating_point())


def _floats(flow: Any) -> list[Tensor]:
    return [x for x in tree_leaves(flow) if x.is_floating_point()]


def _backward(outputs: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run a backward pass from each of `outputs`, with its gradient in `gradients`."""
    # There are several outputs if theta is sent to the next stage along with the hidden states.
    # As in DeepSpeed, each pass except the last keeps the graph, and so the activations.
    for left, output, gradient in zip(range(len(outputs))[::-1], outputs, gradients, strict=False):
        output.backward(gradient, retain_graph=left > 0)
