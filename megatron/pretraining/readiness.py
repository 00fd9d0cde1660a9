"""Check what a run needs on this machine before it is queued: text, tokenizer, folders, disk, port.

Nothing is left on the disk, no device is used, and torch is not imported.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron.config import Config
from megatron.config.builtin import task_name
from megatron.config.sections.data import DataConfig
from megatron.data.corpora.catalogue import CORPORA, GPT2_FILES
from megatron.data.errors import DataError
from megatron.data.samples.split import split_documents
from megatron.data.shards.joined import join, open_each
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.files import existing, why_unwritable

_BUILTIN = "builtin:"
_NEOX = "20B_tokenizer.json"
_NEOX_URL = "https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json"
_VOCABULARY = 50_304
"""A vocabulary's usual size, by which the size of checkpoints is estimated."""


def readiness(config: Config) -> tuple[list[str], list[str]]:
    """Return lines about the run's text and checkpoints, and a line for each problem."""
    facts: list[str] = []
    problems = [*_tokenizer_problems(config.data)]
    tokenizer = None
    try:
        tokenizer = None if problems else _tokenizer(config.data)
        facts += _text(config, tokenizer)
    except DataError as error:
        problems.append(str(error))
    for look in (_disk(config, tokenizer), _folder_problems(config), _port_problems()):
        for is_problem, line in look:
            (problems if is_problem else facts).append(line)
    return facts, problems


def _tokenizer(data: DataConfig) -> Tokenizer | None:
    """Return the run's tokenizer, or None for a length task, which has its own."""
    if isinstance(data.data_path, str) and task_name(data.data_path):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def _tokenizer_problems(data: DataConfig) -> Iterator[str]:
    """Yield a line for each missing file of the tokenizer, with the command that makes it."""
    for key, path in (("vocab_file", data.vocab_file), ("merge_file", data.merge_file)):
        if path is None or Path(path).is_file():
            continue
        if Path(path).name in GPT2_FILES:
            how = f"downloaded with the text: {_command(data)}"
        elif Path(path).name == _NEOX:
            how = f"curl -L --create-dirs -o {path} {_NEOX_URL}"
        elif data.tokenizer_type == "HFTokenizer":
            how = f"python tools/train_tokenizer.py TEXTS --size 32000 --out {path}"
        else:
            how = "copy the file of the published model there, or name your own"
        yield f"{key}: {path}: no such file; {how}"


def _text(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    """Return a line about the training text, which `tokenizer` must have made unless it is None.

    Raises:
        DataError: Shards are missing or damaged. The message has the command that makes them.
    """
    data, batch = config.data, config.batch.train_batch_size
    paths = data.train_data_paths or data.data_path
    if not paths or (isinstance(paths, str) and paths.startswith(_BUILTIN)):
        return []
    try:
        for other in (data.valid_data_paths, data.test_data_paths):
            open_each(other, tokenizer) if other else None
        readers = open_each(paths, tokenizer)
    except DataError as error:
        raise DataError(f"{error}\n    {_command(data)}") from None
    sizes = join(readers).sizes
    first, last = split_documents(data.split, len(sizes))[0]
    if data.train_data_paths:
        first, last = 0, len(sizes)
    tokens = int(sizes[first:last].sum(dtype="int64"))
    wanted = batch * config.model.seq_length * config.training.train_iters
    return [
        f"text to train on {tokens:,} tokens in {last - first:,} of {len(sizes):,} documents; "
        f"the run reads {wanted:,} = {wanted / max(1, tokens):.3g} epochs"
    ]


def _command(data: DataConfig) -> str:
    """Return the command that makes the first shard with the tokenizer of the config."""
    paths = data.train_data_paths or data.data_path or "data/mine_text_document"
    prefix = paths if isinstance(paths, str) else paths[0]
    folder, name = Path(prefix).parent, Path(prefix).name.removesuffix("_text_document")
    what, into = f"--input FILES --name {name}", folder
    if name in CORPORA and folder.name == name:
        what, into = name, folder.parent
    files = "".join(
        f" {flag} {path}"
        for flag, path in (("-v", data.vocab_file), ("-m", data.merge_file))
        if path and Path(path).name not in GPT2_FILES
    )
    return f"python prepare_data.py {what} -d {into} -t {data.tokenizer_type}{files}"


def _disk(config: Config, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, str]]:
    """Yield whether the disk is too small for the checkpoints, and a line about their size."""
    m, c, steps = config.model, config.checkpoint, config.training.train_iters
    if not c.save or not steps:
        return
    vocabulary = tokenizer.vocab_size if tokenizer else _VOCABULARY
    each = 16 if config.training.precision == "fp32" else 14  # weights, master, two moments
    size = each * (m.block_parameters + 2 * vocabulary * m.hidden_size)
    count = steps // (c.save_interval or steps) + len(c.extra_save_iters)
    if c.keep_last_n_checkpoints:
        count = min(count, c.keep_last_n_checkpoints + 1)  # the oldest goes after the newest came
    folder = existing(Path(c.save))
    free = shutil.disk_usage(folder).free
    text = f"checkpoints {count} x {size / 1e9:,.3g} GB = {count * size / 1e9:,.3g} GB at most; "
    text += f"{folder} has {free / 1e9:,.3g} GB free"
    small = "; write keep_last_n_checkpoints: 2, a larger save_interval, or another folder"
    full = count * size > free
    yield full, f"save: {text}{small}" if full else text


def _folder_problems(config: Config) -> Iterator[tuple[bool, str]]:
    folders = {"save": config.checkpoint.save, "tensorboard_dir": config.logging.tensorboard_dir}
    for key, path in folders.items():
        if path and (why := why_unwritable(existing(Path(path)))):
            yield True, f"{key}: {path}: {existing(Path(path))} {why}; write another folder"


def _port_problems() -> Iterator[tuple[bool, str]]:
    """Yield a line if MASTER_PORT is taken, unless torchrun, which listens there, started this."""
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdecimal() or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    try:
        with socket.create_server(("", int(port))):
            pass
    except (OSError, OverflowError) as error:
        yield True, f"MASTER_PORT: {port}: {error}; export MASTER_PORT with a free port's number"
