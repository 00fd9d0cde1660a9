"""Read published (GPT-NeoX) checkpoints, and merge the shards of tensor-parallel ranks.

    SRC/latest                                          name of the newest checkpoint
    SRC/global_stepN/layer_XX-model_YY-model_states.pt  weights
    SRC/global_stepN/mp_rank_YY_model_states.pt         counters, schedule, optimizer, random state
    SRC/global_stepN/configs/*.yml                      the configuration of the training run

With `pipe_parallel_size: 0`, GPT-NeoX writes no layer files. The weights are then in the entry
`module` of `mp_rank_YY_model_states.pt`, with the names `sequential.XX.NAME`.

Weights and counters are read. The optimizer's state is not read: it is one flat tensor, and only
GPT-NeoX defines the order of its elements. `safe_load` opens the files, so code in the files does
not run.

Legend: L layers, N tensor-parallel ranks.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron.engine.errors import CheckpointError
from megatron.engine.neox import counters, layout
from megatron.engine.neox.shape import NORM, Shape, published_name
from megatron.model.theta import THETA

NO_WEIGHTS = "no layer files, and no weights in mp_rank_00_model_states.pt; a file is missing"
MOST_FILES = 100_000
"""If the names of a checkpoint's files imply more files than this, some name is damaged."""


@dataclass
class Published:
    """A published (GPT-NeoX) checkpoint, with its tensor-parallel shards merged.

    Attributes:
        shape: The properties of the model, inferred from the files.
        step: The number of optimizer steps taken.
        weights: Maps this project's names to merged tensors, in the stored dtype.
        buffers: Maps GPT-NeoX's names to stored slopes or frequencies. These are never trained.
        shards: Maps "POSITION.NAME" to the original tensor-parallel shards of a tensor. POSITION is
            the pipeline position, and NAME is GPT-NeoX's name. Only tensors whose merged value
            cannot be split into these shards again have an entry.
        schedule: The recorded learning-rate schedule; None if missing.
        args: The recorded configuration values that are integers or strings.
        problems: One line for each file or tensor that is missing, unknown or inconsistent. The
            weights are complete only if this list is empty.
        notes: Lines that are printed for the user.
    """

    # The configuration determines `buffers`, so they are only checked and exported again.

    shape: Shape
    step: int
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, list[Tensor]] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(checkpoint: Path, *, summed_biases: bool | None = False) -> Published:
    """Read a published (GPT-NeoX) checkpoint, and merge the tensor-parallel shards of its tensors.

    A tensor that is missing, unknown or inconsistent raises no error. Instead, a line is added to
    `Published.problems`, and some weights are missing in the result.

    Args:
        summed_biases: Whether the model was trained with GPT-NeoX's `gpt_j_residual`. The shards of
            a row-parallel layer's bias are then added. None means that this is not known.

    Raises:
        CheckpointError: A file cannot be read, or it contains more than tensors and plain values.
    """
    client = counters.client_state(checkpoint)
    args = {k: v for k, v in counters.mapping(client, "args").items() if isinstance(v, (int, str))}
    stored = _stored(checkpoint)
    if not stored:
        raise CheckpointError(f"{checkpoint}: {NO_WEIGHTS}")
    last = max((index for index, _ in stored), default=0)
    states = {
        place: {published_name(name): value for name, value in state.items()}
        for place, state in stored.items()
    }
    tied = not any("final_linear.weight" in state for state in states.values())
    num_layers = counters.count(args, "num_layers") or max(0, last - (3 if tied else 4))
    # `mp_world_size` is the number of tensor-parallel ranks times the number of pipeline stages.
    recorded = counters.count(args, "model_parallel_size") or 1
    parts = max([recorded, *(rank + 1 for _, rank in stored)])
    if num_layers * parts > MOST_FILES:
        raise CheckpointError(
            f"{checkpoint}: {num_layers} layers in {parts} tensor-parallel ranks are more than any "
            "model has; its file names, or the counts in mp_rank_00_model_states.pt, are damaged"
        )
    shape = _infer(states, num_layers, tied, parts, counters.count(args, "num_attention_heads"))
    head = any("mlp.linear1.weight" in state for state in stored.values())
    shape = replace(shape, summed_biases=summed_biases, head=head)
    step, schedule = counters.step_of(client, checkpoint), counters.schedule_of(client)
    out = Published(shape, step, schedule=schedule, args=args)
    by_index = _shards_by_position(states, out)
    kernels = {}
    for index, group in by_index.items():
        merged = _merge_position(index, group, out)
        kernel = {name: merged.pop(name) for name in list(merged) if name.startswith(layout.RPE)}
        kernels[index] = kernel
        for name, tensor in merged.items():
            ours = layout.our_name(index, name, num_layers)
            if name in layout.BUFFERS:
                out.buffers[name] = tensor
            elif ours is None:
                out.problems.append(f"{layout.file_name(index, 0)}: {name} is not known")
            else:
                out.weights[ours] = tensor
    drifted = [each for each in out.shards if shape.rule(each.partition(".")[2]) != "summed"]
    if drifted:
        what = f"{len(drifted)} tensors, such as {drifted[0]}"
        out.notes.append(f"{what}: the shards differ slightly; their mean is taken")
    _check_width(out)
    _take_kernel({i: kernel for i, kernel in kernels.items() if 2 <= i < num_layers + 2}, out)
    return out


def has_weights(checkpoint: Path) -> bool:
    """Return whether a folder contains layer files, or weights of `pipe_parallel_size: 0`."""
    return any(checkpoint.glob("layer_*")) or bool(_stored(checkpoint))


def _stored(checkpoint: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the stored tensors of each (pipeline position, tensor-parallel rank), by name."""
    paths = {path: path.name for path in sorted(checkpoint.iterdir())}
    layers = {path: match for path, name in paths.items() if (match := layout.FILE.fullmatch(name))}
    if layers:
        return {(int(m[1]), int(m[2])): counters.load_mapping(path) for path, m in layers.items()}
    found: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for path, name in paths.items():  # trained with `pipe_parallel_size: 0`
        if rank := layout.RANK_FILE.fullmatch(name):
            for key, tensor in counters.mapping(counters.load_mapping(path), "module").items():
                if match := re.fullmatch(r"sequential\.(\d+)\.(.+)", str(key)):
                    found[int(match[1]), int(rank[1])][match[2]] = tensor
    return found


def _infer(states: dict, num_layers: int, tied: bool, parts: int, num_heads: int | None) -> Shape:
    """Infer the properties of the model from the first rank's tensors."""
    # The fields `theta`, `summed_biases` and `head` keep their defaults.

    def matrices(*tensors: Any) -> bool:
        return all(isinstance(tensor, Tensor) and tensor.ndim == 2 for tensor in tensors)

    first = {index: state for (index, rank), state in sorted(states.items()) if rank == 0}
    block = first.get(2, {})
    inner, back = block.get("mlp.dense_h_to_4h.weight"), block.get("mlp.dense_4h_to_h.weight")
    output = first.get(num_layers + 4, {}).get("final_linear.weight")
    words = first.get(0, {}).get("word_embeddings.weight")
    fused = block.get("attention.query_key_value.weight")
    group = 1
    if matrices(fused, words):
        hidden, rows = words.shape[1], fused.shape[0] * parts
        group = max(1, round(2 * hidden / max(1, rows - hidden)))
    return Shape(
        num_layers=num_layers,
        tied=tied,
        parts=parts,
        geglu=matrices(inner, back) and inner.shape[0] == 2 * back.shape[1],
        group=group,
        head_size=words.shape[1] // num_heads if num_heads and matrices(words) else 0,
        row_output=matrices(output, words) and output.shape[1] != words.shape[1],
    )


def _shards_by_position(states: dict, out: Published) -> dict[int, list[dict[str, Tensor]]]:
    """Return a dict from pipeline position to a list of each rank's tensors, by name.

    Positions with missing files are left out.

    Args:
        states: Maps (pipeline position, tensor-parallel rank) to the tensors, by name.
        out: The checkpoint. Each missing or unknown file adds a line to `out.problems`.
    """
    shape = out.shape
    expected = {
        (index, rank)
        for index in layout.positions(shape.num_layers, shape.tied)
        for rank in range(shape.parts)
    }
    for place in sorted(expected - states.keys()):
        out.problems.append(f"{layout.file_name(*place)}: missing")
    for place in sorted(states.keys() - expected):
        problem = f"{layout.file_name(*place)}: has no place among {shape.num_layers} layers"
        out.problems.append(problem)
    complete = {index for index, _ in expected} - {index for index, _ in expected - states.keys()}
    return {i: [states[i, rank] for rank in range(shape.parts)] for i in sorted(complete)}


@contextmanager
def _collected(problems: list[str], where: str) -> Iterator[None]:
    """Add the text of an error of the `with` block to `problems`, and suppress the error."""
    # Only ValueError, RuntimeError and CheckpointError are suppressed.
    try:
        yield
    except (ValueError, RuntimeError, CheckpointError) as error:
        problems.append(f"{where}: {error}")


def _merge_position(
    index: int, group: list[dict[str, Tensor]], out: Published
) -> dict[str, Tensor]:
    """Merge the tensor-parallel shards of each tensor at one pipeline position.

    Args:
        index: The pipeline position.
        group: Each tensor-parallel rank's shards by name.

    Returns:
        A dict from name to merged tensor.
    """
    # Each tensor that cannot be merged adds a line to `out.problems` instead.
    merged = {}
    for name in sorted(set().union(*group)):
        where = f"{layout.file_name(index, 0)}: {name}"
        shards = [shard for state in group if _is_plain(shard := state.get(name))]
        if len(shards) < len(group):
            problem = f"not a dense tensor of floats in every one of the {len(group)} shards"
            out.problems.append(f"{where}: {problem}")
            continue
        if name == f"{NORM}weight":
            problem = "gpt-neox takes its mean over all heads of a rank, this project of each head"
            out.problems.append(f"{where}: {problem}")
        how = out.shape.rule(name)
        with _collected(out.problems, where):
            shards = [out.shape.ours(name, shard) for shard in shards]
            merged[name] = layout.merge(shards, how)
            if how in layout.NOT_CONCATENATED and any(
                not torch.equal(shard, shards[0]) for shard in shards
            ):
                out.shards[f"{index}.{name}"] = shards
    return merged


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _check_width(out: Published) -> None:
    """Add a line to `out.problems` if attention's output matrix is not square."""
    square = out.weights.get("layers.0.attention.dense.weight")
    if square is not None and (square.ndim != 2 or square.shape[0] != square.shape[1]):
        out.problems.append(
            f"attention.dense.weight: {tuple(square.shape)} from {out.shape.parts} tensor-parallel "
            "shard(s), but it is square when complete; all files of some rank are missing"
        )


def _take_kernel(kernels: dict[int, dict[str, Tensor]], out: Published) -> None:
    """Add the positional embedding's tensors to `out`, as learned parameters or fixed slopes.

    Args:
        kernels: Maps each block's position to its tensors, by GPT-NeoX's names.
    """
    # If the tensors are not the same in all blocks, a line is added to `out.problems` instead.
    if not any(kernels.values()):
        return
    first = min(kernels)
    known = {layout.RPE + name for name in (*layout.THETA, layout.TABLE)}
    for index, kernel in kernels.items():
        for name in sorted(kernel.keys() ^ kernels[first].keys() | kernel.keys() - known):
            problem = f"{layout.file_name(index, 0)}: {name} is not in every block, or not known"
            out.problems.append(problem)
    if out.problems:
        return
    different = [
        index - 2
        for index, kernel in kernels.items()
        if any(not torch.equal(kernel[name], tensor) for name, tensor in kernels[first].items())
    ]
    if different:
        out.problems.append(
            f"the kernel of blocks {different} is not that of block {first - 2}: pipeline stages "
            "trained separate copies, but this model has one kernel for all blocks"
        )
        return
    if set(kernels[first]) == {layout.FIXED}:
        out.buffers |= kernels[first]
        return
    with _collected(out.problems, f"{layout.file_name(first, 0)}: {layout.RPE}*"):
        out.weights[THETA], names = layout.theta_from_columns(kernels[first])
        out.shape = replace(out.shape, theta=tuple(names))
