"""Which checkpoint of a folder a job starts from: the newest, if it is whole."""

from __future__ import annotations

from pathlib import Path

from megatron.engine.checkpoint import manifest
from megatron.engine.checkpoint.saved import finished, newest
from megatron.engine.errors import CheckpointError
from megatron.engine.job.agreement import seen_by_all
from megatron.engine.neox.read import is_published
from megatron.parallel import Groups


def usable(folder: Path, groups: Groups, *, allow_fallback: bool) -> tuple[str | None, str]:
    """(tag to resume from, what was found damaged); every rank must call it.

    Args:
        allow_fallback: pass over damaged checkpoints: to the newest whole one of those before, or,
            where there is none, of those that `latest` does not count (any more, or yet).

    Raises:
        CheckpointError: names the damaged file, why it is damaged, and the checkpoint before it.
    """
    tags, tag, problem = seen_by_all(lambda: _look(folder), folder, groups)
    found = [problem] if problem else []
    if problem and not (allow_fallback and tags):
        raise CheckpointError(problem)
    if tag is not None:
        behind = tags.index(tag) + 1 if tag in tags else 0
        tags = [tag, *tags[behind:], *(each for each in tags[:behind] if each != tag)]
    elif not problem:
        return None, ""
    for number, each in enumerate(tags):
        problem = None
        if not is_published(folder / each):  # that format has neither sizes nor checksums
            problem = manifest.damage(folder / each, groups)
        if problem is None:
            return each, "; ".join(found)
        found.append(problem)
        if not allow_fallback:
            before = tags[number + 1 : number + 2]
            way = f"resume from {folder / before[0]} with --allow-fallback, or " if before else ""
            raise CheckpointError(
                f"{folder / each} is damaged: {problem}. Restore that file, or {way}"
                f"remove {folder / 'latest'} to start afresh"
            )
    raise CheckpointError(f"{folder} holds no whole checkpoint: " + "; ".join(found))


def _look(folder: Path) -> tuple[list[str], str | None, str]:
    """(tags, newest first; the one that `latest` names; what is wrong with `latest`)."""
    tags = finished(folder)[::-1]
    try:
        return tags, newest(folder), ""
    except CheckpointError as error:
        return tags, None, str(error)
