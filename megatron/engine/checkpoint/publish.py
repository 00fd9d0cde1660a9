"""Write new folders so that each one appears complete or not at all.

The function `new_folder` is for tools that write a folder (imports, exports, conversions).

A training run saves a checkpoint `NAME` in more steps, because the checkpoint may replace an older
checkpoint of the same name, and because the file `latest` must name the new checkpoint. First, the
checkpoint is written into the folder `.unfinished-NAME`. The folder is flushed to disk and renamed
to `NAME`. Only then is `NAME` written into the file `latest`. If an older folder `NAME` exists, the
older folder is renamed to `.replaced-NAME` just before the new folder is renamed, and deleted at
the end.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from megatron.engine.checkpoint.checksums import describe_files, write_record
from megatron.engine.errors import CheckpointError
from megatron.engine.job.lease import Confirm, sole_writer
from megatron.files import UNFINISHED as UNFINISHED_FILE
from megatron.files import existing, flush, naming, read_start, replacing
from megatron.parallel.groups import build_groups
from megatron.run_folder import RECORD, RunFolder, tag_of

UNFINISHED, REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder. When the `with` block ends, rename that folder to `path`.

    If the block raises an exception, the folder is removed.

    Raises:
        CheckpointError: Another process is writing `path`.
        OSError: `path` exists and is not an empty folder.
    """
    # The yielded folder has the same name as `path`, and lies in a staging folder beside `path`. If
    # the process is killed, the next call for the same `path` removes the staging folder.
    path = path.resolve()
    staging = path.with_name(f".{path.name}{UNFINISHED_FILE}")
    try:
        with naming(path), sole_writer(staging, "target") as confirm:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                text = "exists and is not empty; remove it, or name another folder"
                raise FileExistsError(f"{path} {text}")
            for left in staging.glob("[!.]*"):  # by processes that were killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            # The name is unique: a writer that was suspended too long goes on in its own folder.
            own = staging / f"new-{uuid.uuid4().hex}"
            folder = own / path.name
            folder.mkdir(parents=True)
            try:
                yield folder
                confirm()
                for file in (*folder.rglob("*"), folder):
                    flush(file)
                confirm()
                folder.rename(path)
                flush(path.parent)
            finally:
                shutil.rmtree(own, ignore_errors=True)
    finally:
        with suppress(OSError):  # another process may hold its lease by now
            staging.rmdir()


@contextmanager
def new_checkpoint(folder: Path, tag: str) -> Iterator[Path]:
    """Yield an empty folder for a checkpoint. After the `with` block, rename it to `folder/tag`.

    Raises:
        CheckpointError: `folder/tag` exists already, or another process writes into `folder`.
    """
    # After an error in the block, nothing is renamed.
    with sole_writer(folder) as confirm:
        if (folder / tag).exists():
            text = "exists already; remove it, or name another folder"
            raise CheckpointError(f"{folder / tag} {text}")
        yield create_unfinished(folder, tag)
        publish(folder, tag, confirm)


def write_import(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    about: Mapping[str, Any],
    configs: Path | None = None,
) -> None:
    """Write a checkpoint without an optimizer, from weights that other code has trained.

    Args:
        run: The run folder, in which the checkpoint becomes a subfolder.
        step: The number of optimizer steps for which the weights were trained.
        state: The content of the weights file. Its entry `module` maps names to weights.
        about: Entries for the checkpoint's file `kerple.json`, which describe the import.
        configs: A folder that is copied into the checkpoint; None copies none.

    Raises:
        OSError: The files cannot be written, for example because the disk is full.
    """
    with new_checkpoint(run, tag_of(step)) as folder:
        weights = folder / "mp_rank_00_model_states.pt"
        try:
            torch.save(dict(state), weights)
        except RuntimeError as error:  # torch's file writer raises it on a full disk
            why = why_not_written(folder, error)
            raise OSError(f"the weights: {why} ({weights})") from None
        if configs is not None:
            shutil.copytree(configs, folder / "configs")
        progress = {"step": step, "consumed_samples": 0, "train_samples": 0}
        record = {"progress": progress, "layout": {"zero_stage": 0}, **about}
        write_record(folder, record, describe_files(folder, build_groups(torch.device("cpu"))))


def create_unfinished(folder: Path, tag: str) -> Path:
    """Create and return the empty folder `.unfinished-TAG`, where TAG is `tag`."""
    # `publish` renames it later.
    unfinished = folder / f"{UNFINISHED}{tag}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def publish(folder: Path, tag: str, confirm: Confirm) -> None:
    """Complete a checkpoint: rename `.unfinished-TAG` to `TAG`, and write TAG to `folder/latest`.

    Args:
        folder: The run folder.
        tag: The name TAG of the checkpoint's folder, such as `global_step100`.
        confirm: A function that raises an error if another job has taken `folder` over.
    """
    # All files are first flushed to disk, `metrics.jsonl` too. `confirm` checks the lease (see
    # `job/lease.py`).
    unfinished, final = folder / f"{UNFINISHED}{tag}", folder / tag
    rows = folder.glob(RunFolder(folder).metrics.name)
    # A run that resumes from this checkpoint never writes the rows again.
    for path in (*unfinished.rglob("*"), unfinished, *rows):
        flush(path)
    replaced = folder / f"{REPLACED}{tag}"
    confirm()
    # If the process is killed after the renames, `remove_unfinished` completes `latest`.
    with replacing(RunFolder(folder).latest) as latest:
        latest.write_text(tag)
        flush(latest)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        flush(folder)
        confirm()
    shutil.rmtree(replaced, ignore_errors=True)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what a killed run left, or complete its save. Return the names of deleted folders."""
    # A killed run may leave folders `.unfinished-NAME` and `.replaced-NAME`, and temporary files
    # (see `megatron.files.replacing`). Two things are kept:
    # - `.replaced-NAME`, if there is no folder `NAME`. It is renamed back to `NAME`.
    # - The temporary file for `latest`, if this file names a complete checkpoint. It is renamed to
    #   `latest`, which completes the interrupted save.
    for replaced in folder.glob(f"{REPLACED}*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if not final.exists():  # killed between the two renames: the old one is still the newest
            replaced.rename(final)
    for file in folder.glob(f".latest.*{UNFINISHED_FILE}"):
        tag = read_start(file) if file.is_file() else ""
        if (folder / tag / RECORD).is_file() and not (folder / f"{UNFINISHED}{tag}").exists():
            file.replace(RunFolder(folder).latest)  # killed when only this was left to do
    for file in folder.glob(f".*{UNFINISHED_FILE}"):
        if not file.is_dir():  # as `new_folder` makes them
            file.unlink(missing_ok=True)
    leftovers = sorted([*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*")])
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]


def why_not_written(folder: Path, error: Exception) -> str:
    """Return a text that says why a write into `folder` failed, and how much disk space is free."""
    why = str(error) or type(error).__name__
    if re.search("inline_container|PytorchStreamWriter|iostream", why):
        why = "a file could not be written to its end"  # torch reports only byte counts
    disk = os.statvfs(existing(folder))
    if disk.f_files and not disk.f_favail:
        return f"{why}; all {disk.f_files:,} files (inodes) that its disk can hold are taken"
    free = f"{why}; {disk.f_bavail * disk.f_frsize / 1e6:,.0f} MB are free there"
    quota = isinstance(error, OSError) and error.errno == errno.EDQUOT
    return f"{free}, but this user's quota is used up" if quota else free
