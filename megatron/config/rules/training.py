"""Refuse wrong values of some config keys for training.

The keys are `curriculum`, `on_bad_loss`, `torch_compile`, `seed` and `train_iters`.
"""

from megatron.config.builtin import task_name
from megatron.config.choices import MODES_WITH_CUDA_GRAPHS
from megatron.config.rules.relation import Found, relation

MOST_SAMPLES = 10**11
"""A run may read at most this many training samples, because their order must fit into memory."""


@relation("curriculum", "seq_length")
def _curriculum(stages: tuple[tuple[int, int], ...], length: int) -> Found | None:
    steps = [step for step, _ in stages]
    text = ""
    if uneven := [each for _, each in stages if length % each]:
        text = f"length {uneven[0]} does not divide seq_length {length}, so no equal sequences "
        text += f"can be cut; write a divisor of {length}"
    elif steps and (steps[0] or steps != sorted({*steps})):
        text = f"its steps are {', '.join(map(str, steps))}; write steps that begin with 0 and rise"
    elif stages and stages[-1][1] != length:
        text = f"ends with length {stages[-1][1]}; write a last length of {length}, the seq_length"
    return ("curriculum", text) if text else None


@relation("curriculum", "data_path")
def _whole_examples(stages: tuple[tuple[int, int], ...], path: str) -> Found | None:
    if stages and (name := task_name(path)):
        return "curriculum", f"would cut the examples of {name}; leave it out"


@relation("on_bad_loss", "zero_stage", "pipe_parallel_size", "precision")
def _bad_loss(action: str, zero: int, stages: int, precision: str) -> Found | None:
    if action != "skip":
        return None
    why = None
    if zero == 0:
        why = "skip with zero_optimization stage 0: the optimizer there cannot drop a gradient"
    elif stages > 1:
        why = f"skip with pipe_parallel_size {stages}: only the last stage knows the loss in time"
    elif precision == "fp16":
        why = "skip with fp16: its loss scale skips overflows already"
    return ("on_bad_loss", f"{why}; write roll_back or stop") if why else None


@relation("torch_compile", "zero_stage", "pipe_parallel_size", "model_parallel_size")
def _compiled(compiled: bool, zero: int, stages: int, tensor: int) -> Found | None:
    if not compiled or (zero < 3 and stages <= 1 and tensor <= 1):
        return None
    asked = "zero_optimization stage 3" if zero == 3 else "tensor or pipeline parallelism"
    return "torch_compile", f"true with {asked}: not supported; leave the key out"


@relation("torch_compile_mode", "torch_compile", "context_parallel_size")
def _compile_mode(mode: str, compiled: bool, context: int) -> Found | None:
    if mode != "default" and not compiled:
        text = f"{mode} without torch_compile, so nothing is compiled"
        return "torch_compile_mode", f"{text}; write torch_compile: true too"
    if mode in MODES_WITH_CUDA_GRAPHS and context > 1:
        text = f"{mode} with context_parallel_size {context}: its CUDA graphs would have to hold "
        return "torch_compile_mode", f"{text}the messages between ranks; write default"


@relation("seed")
def _seed(seed: int) -> Found | None:
    if seed >= 2**32:
        return "seed", f"{seed} is above 2^32 - 1, the largest seed; write a smaller one"


@relation("train_iters", "train_batch_size")
def _samples(steps: int, batch: int) -> Found | None:
    if steps * batch > MOST_SAMPLES:
        text = f"{steps} x train_batch_size {batch} are {steps * batch:.1e} samples, and at most"
        return "train_iters", f"{text} {MOST_SAMPLES:.0e} are possible; write a smaller number"


@relation("on_bad_loss", "save", unset=True)
def _roll_back(action: str, save: str | None) -> Found | None:
    if action == "roll_back" and not save:
        return "on_bad_loss", "roll_back needs checkpoints to go back to; write save: FOLDER"
