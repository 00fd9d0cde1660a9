"""Check what a run needs on this machine before it is queued: text, tokenizer, folders, disk.

The check leaves no file on the disk and uses no GPU. This module does not import torch.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.config import Config
from megatron.config.builtin import PREFIX, task_name
from megatron.config.sections.data import DataConfig
from megatron.data.corpora.catalogue import CORPORA, GPT2_FILES
from megatron.data.errors import DataError
from megatron.data.samples.split import NO_VALIDATION, SPLITS, split_documents
from megatron.data.shards.joined import join, open_each
from megatron.data.tokenizers.build import build_tokenizer
from megatron.files import existing, why_unwritable
from megatron.run_folder import RunFolder, is_checkpoint
from megatron.shipped import find

_NEOX = "20B_tokenizer.json"
_NEOX_URL = "https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json"
# A vocabulary's usual size, by which the size of checkpoints is estimated.
_VOCABULARY = 50_304

Finding = tuple[bool, str]
"""Whether the run cannot start because of it, and a line for the user."""


def readiness(config: Config) -> Iterator[Finding]:
    """Yield (whether it is a problem, text) for each fact about text, checkpoints and folders."""
    if task_name(config.data.data_path) is None:
        yield from _text(config)
    if config.checkpoint.save and config.training.train_iters:
        yield _disk(config, Path(config.checkpoint.save))
    folders = {"save": config.checkpoint.save, "tensorboard_dir": config.logging.tensorboard_dir}
    for key, path in folders.items():
        if path and (why := why_unwritable(existing(Path(path)))):
            yield True, f"{key}: {path}: {existing(Path(path))} {why}; write another folder"
    if config.training.train_iters and lacks_checkpoint(config):
        yield True, f"load: {config.checkpoint.load}: holds no checkpoint; name a run's folder"


def lacks_checkpoint(config: Config) -> bool:
    """Return whether the run has no checkpoint to load, although the config requires one.

    The config requires a checkpoint if it sets `load` to a folder other than `save`. The checkpoint
    may be in either folder.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    folders = {Path(name).resolve() for name in (save, load) if name}
    if not load or (save and len(folders) == 1):
        return False
    return not any(is_checkpoint(path) or RunFolder(path).latest.exists() for path in folders)


def _text(config: Config) -> Iterator[Finding]:
    """Yield (whether it is a problem, text) for each fact about the text and its tokenizer."""
    # These are missing files, and how often the text is read.
    data, tokenizer = config.data, None
    builtin = str(data.data_path).startswith(PREFIX)
    missing = list(_missing_files(data))
    yield from ((True, line) for line in missing)
    try:
        if not missing:
            tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        if builtin:
            return
        for paths in (data.valid_data_paths, data.test_data_paths):
            open_each(paths, tokenizer) if paths else None
        sizes = join(open_each(data.train_data_paths or data.data_path or (), tokenizer)).sizes
    except DataError as error:
        yield True, str(error) if builtin else f"{error}\n    {_command(data)}"
        return
    splits = split_documents("1" if data.train_data_paths else data.split, len(sizes))
    first, last = splits[0]
    tokens = int(sizes[first:last].sum(dtype="int64"))
    validates = config.training.eval_iters and not data.valid_data_paths
    none = "" if not validates or splits[1][0] < splits[1][1] else NO_VALIDATION
    wanted = config.batch.train_batch_size * config.model.seq_length * config.training.train_iters
    yield (
        False,
        f"text to train on {tokens:,} tokens in {last - first:,} of {len(sizes):,} documents; "
        f"the run reads {wanted:,} = {wanted / max(1, tokens):.3g} epochs{none}",
    )
    name, longest = config.evaluation.eval_split, max(config.evaluation.eval_lengths, default=0)
    first, last = splits[SPLITS.index(name)]
    held = int(sizes[first:last].sum(dtype="int64"))
    if not data.train_data_paths and held <= longest > 0:
        text = f"split: the {name} split has {held:,} tokens in {last - first:,} documents, too few"
        yield True, f"{text} for eval_lengths up to {longest:,}; give it a larger weight"


def _missing_files(data: DataConfig) -> Iterator[str]:
    """Yield a line for each missing file of the tokenizer, with the command that creates it."""
    for key, path in (("vocab_file", data.vocab_file), ("merge_file", data.merge_file)):
        if path is None or find(path).is_file():
            continue
        how = "copy the file of the published model there, or name your own"
        if Path(path).name in GPT2_FILES:
            how = f"downloaded with the text: {_command(data)}"
        elif Path(path).name == _NEOX:
            how = f"curl -L --create-dirs -o {path} {_NEOX_URL}"
        elif data.tokenizer_type == "HFTokenizer":
            how = f"python tools/train_tokenizer.py TEXTS --size 32000 --out {path}"
        yield f"{key}: {path}: no such file; {how}"


def _command(data: DataConfig) -> str:
    """Return the command that creates the config's first token shard with its tokenizer."""
    paths = data.train_data_paths or data.data_path or "data/mine_text_document"
    prefix = Path(paths if isinstance(paths, str) else paths[0])
    name = prefix.name.removesuffix("_text_document")
    what, into = f"--input FILES --name {name}", prefix.parent
    if name in CORPORA and prefix.parent.name == name:
        what, into = name, prefix.parent.parent
    files = [f"-v {data.vocab_file}"] if data.vocab_file else []
    files += [f"-m {data.merge_file}"] if data.merge_file else []
    if Path(data.vocab_file or "").name in GPT2_FILES:  # which are downloaded
        files = []
    return " ".join([f"python prepare_data.py {what} -d {into} -t {data.tokenizer_type}", *files])


def _disk(config: Config, save: Path) -> Finding:
    """Return (whether the disk is too small for the checkpoints, a line about their size)."""
    m, c, steps = config.model, config.checkpoint, config.training.train_iters
    each = 16 if config.training.precision == "fp32" else 14  # weights, master, two moments
    size = each * (m.block_parameters + 2 * _VOCABULARY * m.hidden_size) / 1e9
    count = steps // (c.save_interval or steps) + len(c.extra_save_iters)
    if c.keep_last_n_checkpoints:
        count = min(count, c.keep_last_n_checkpoints + 1)  # the oldest goes after the newest came
    count = max(0, count - len(RunFolder(save).tags()))  # of a run that is resumed
    free = shutil.disk_usage(existing(save)).free / 1e9
    text = f"about {count} x {size:,.3g} = {count * size:,.3g} GB of checkpoints to come; "
    text += f"{existing(save)} has {free:,.3g} GB free"
    if count * size <= free:
        return False, text
    advice = "write keep_last_n_checkpoints: 2, a larger save_interval, or another folder"
    return True, f"save: {text}; {advice}"
