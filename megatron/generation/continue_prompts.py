"""Continue prompts with a run's newest checkpoint, and write the prompts and continuations."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import OpenRun, open_run
from megatron.generation.loop import Speed, continue_texts
from megatron.generation.sampling import Sampling
from megatron.generation.text import Continuation
from megatron.model import GPT
from megatron.parallel.groups import Groups, TensorGroup
from megatron.parallel.rng import named_generator
from megatron.positional import PositionalError


@dataclass(frozen=True)
class GenerationOptions:
    """The settings for generating text.

    Attributes:
        read_prompts: A function that returns a list of prompts. Only rank 0 calls the function. If
            the function returns None and `interactive` is false, the model writes one text without
            a prompt, after an end-of-document token.
        max_new_tokens: The largest number of tokens of a continuation.
        sampling: The settings for choosing tokens.
        stops: The stop sequences. A continuation ends before the first stop sequence in it.
        endless: If true, the end-of-document token is never chosen. If false, this token can be
            chosen and ends the continuation.
        seed: The seed of the random numbers.
        batch_size: The number of continuations that are generated at the same time.
        samples: The number of continuations of each prompt. Each continuation has its own random
            generator.
        interactive: If false, `read_prompts` is called once. If true, `read_prompts` is called
            again each time its prompts have been continued, until `read_prompts` returns None.
        as_json: If true, write one JSON object per continuation. If false, write plain text, and
            write a single continuation while it is generated.
    """

    read_prompts: Callable[[], list[str] | None]
    max_new_tokens: int
    sampling: Sampling
    stops: Sequence[str] = ()
    endless: bool = False
    seed: int = 0
    batch_size: int = 8
    as_json: bool = False
    samples: int = 1
    interactive: bool = False


def generate(
    config: Config, load: Path, options: GenerationOptions,
    write: Callable[[str], None], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Continue the prompts with the newest checkpoint in the run folder `load`.

    Call this function in a single process, or in every process of a torchrun job. In a job, tensor
    parallelism splits the model over all processes.

    Args:
        config: The configuration. Its degree of tensor parallelism must be the number of processes.
        load: The run folder.
        write: A function that writes the prompts and continuations. Only rank 0 calls it.
        say: A function that prints a message for the user. Only rank 0 calls it.

    Raises:
        CheckpointError: `load` contains no checkpoint, or the checkpoint does not fit the config.
        DataError: There is no prompt, or a prompt has no tokens (in its last document).
        PositionalError: A trained position table is too short for a prompt and its continuation.
    """
    with job_or_alone(config) as groups:
        groups = groups.divided(model_size=groups.world_size)
        if not groups.is_main:
            write = say = _nothing
        run = open_run(load, config, groups)
        say("\n".join([_origin(run.saved, groups), *run.notes]))
        for before in count() if options.interactive else (0,):
            texts = groups.gather_from_job(options.read_prompts() if groups.is_main else [])[0]
            if options.interactive and texts is None:
                break
            try:
                _continue(run, texts, options, before, groups.model, write, say)
            except (DataError, PositionalError) as error:
                if not options.interactive:
                    raise
                say(f"error: {error}")


def _continue(
    run: OpenRun, texts: list[str] | None, options: GenerationOptions, before: int,
    tp: TensorGroup, write: Callable[[str], None], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Continue the prompts `texts`. If `texts` is None, write a text without a prompt.

    Args:
        before: The number of earlier prompts. The random numbers depend on it.
    """
    model, tokenizer = run.model, run.tokenizer
    start = [*tokenizer.begin] or [tokenizer.eod]
    prompts = [start] if texts is None else _encoded(texts, tokenizer, model)
    copies = [(n, k) for n in range(len(prompts)) for k in range(options.samples)]
    prompts = [prompts[n] for n, _ in copies]
    texts = [(texts or [""])[n] for n, _ in copies]
    # The last token is chosen, but never read.
    model.embedding.require_positions(max(map(len, prompts)) + options.max_new_tokens - 1)
    streams = len(texts) == 1 and not options.as_json
    if streams:
        write(texts[0])
    to = write if streams else _nothing
    rows, speed = [Continuation(tokenizer, ids, options.stops, to) for ids in prompts], Speed()
    # Each sample of a prompt has its own stream of random numbers.
    streams_of = [f"prompt {before + n}" + (f" sample {k}" if k else "") for n, k in copies]
    for begin in range(0, len(rows), options.batch_size):
        batch = range(begin, min(begin + options.batch_size, len(rows)))
        continue_texts(
            model, [prompts[n] for n in batch], [rows[n] for n in batch],
            [named_generator(options.seed, streams_of[n]) for n in batch], how=options.sampling,
            max_new_tokens=options.max_new_tokens,
            banned=_banned(model, tokenizer, options.endless), tp=tp, speed=speed,
        )  # fmt: skip
        for n in batch:
            write("\n" if streams else _line(texts[n], rows[n], options.as_json))
    say(_report(speed, rows))


def _nothing(text: str) -> None:
    pass


def _origin(saved: Saved, groups: Groups) -> str:
    """Return a line that names the checkpoint and the parallel layout of its training.

    If this project did not write the checkpoint, the line does not contain the layout.
    """
    line = f"generating with {saved.path} on {groups.world_size} {groups.device.type}"
    if saved.kind != "ours":
        return line
    layout = saved.record.layout
    stages, tensor = layout["pipe_parallel_size"], layout["model_parallel_size"]
    return f"{line} (trained in {stages} pipeline stage(s) x {tensor} tensor-parallel)"


def _encoded(texts: list[str], tokenizer: Tokenizer, model: GPT) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises:
        DataError: There is no prompt, or a prompt has no tokens (in its last document).
    """
    if not texts:
        raise DataError("there is no prompt; write one per line")
    prompts = []
    for number, text in enumerate(texts, 1):
        ids = model.last_document(tokenizer.encode_prompt(text))
        if not ids:
            raise DataError(f"prompt {number} is empty; the model continues at least one token")
        prompts.append(ids)
    return prompts


def _banned(model: GPT, tokenizer: Tokenizer, endless: bool) -> list[int]:
    """Return the ids of tokens that are never chosen.

    These are the ids that pad the vocabulary and, if `endless`, the tokens that end a text.
    """
    padding = range(tokenizer.vocab_size, model.shape.vocab_size)
    return [*padding, *(tokenizer.ends if endless else [])]


def _line(prompt: str, row: Continuation, as_json: bool) -> str:
    if not as_json:
        return f"{prompt}{row.text}\n"
    values = {"prompt": prompt, "text": row.text, "tokens": row.tokens, "end": row.end}
    return json.dumps(values, ensure_ascii=False) + "\n"


def _report(speed: Speed, rows: list[Continuation]) -> str:
    total, rate = sum(row.tokens for row in rows), speed.tokens / max(speed.seconds, 1e-9)
    return (
        f"{speed.prompt_tokens:,} prompt tokens, first new tokens after "
        f"{speed.prompt_seconds:.2f} s; {total:,} new tokens, {rate:,.1f} tokens/s after the first"
    )
