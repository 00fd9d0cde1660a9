"""Remove old checkpoints of a run (`keep_last_n_checkpoints`); set those of other runs aside."""

import shutil
import time

from megatron.engine.checkpoint.publish import UNFINISHED
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished
from megatron.engine.errors import CheckpointError
from megatron.engine.job.lease import Confirm, unleased


def set_aside_foreign(saved: Saved, lineage: str) -> None:
    """Rename the folder of a checkpoint if another run wrote the checkpoint.

    Args:
        lineage: The id of this run.
    """
    if saved.path.exists() and _lineage(saved) != lineage:
        aside = saved.path.with_name(f"{saved.tag}.of-another-run-{time.time_ns()}")
        saved.path.rename(aside)
        print(f"{saved.path} is not of this run: renamed to {aside.name}", flush=True)


def _lineage(saved: Saved) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if it cannot be read."""
    # `kerple.json` records it.
    try:
        return saved.record.lineage
    except CheckpointError:
        return None


def prune(newest: Saved, keep_last: int | None, lineage: str, confirm: Confirm = unleased) -> None:
    """Remove old checkpoints of this run: keep the newest `keep_last`.

    Args:
        newest: The newest checkpoint, which is always kept.
        keep_last: The number of checkpoints to keep; None or 0 keeps all.
        lineage: The id of this run.
        confirm: A function that raises an error if another job has taken the run folder over.
    """
    # Checkpoints of later steps than `newest` are neither counted nor removed. Checkpoints of other
    # runs, checkpoints without a readable `kerple.json`, and published (GPT-NeoX) checkpoints are
    # never removed. `confirm` checks the lease (see `job/lease.py`).
    if not keep_last:
        return
    tags = finished(newest.folder)
    earlier = [each for each in tags[: tags.index(newest)] if _lineage(each) == lineage]
    for each in earlier[: max(0, len(earlier) + 1 - keep_last)]:
        confirm()
        # If the process is killed half-way, the next start removes the rest.
        removed = each.path.rename(each.folder / f"{UNFINISHED}{each.tag}")
        shutil.rmtree(removed, ignore_errors=True)
