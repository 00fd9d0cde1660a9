"""Read TensorBoard's event files as TensorBoard does."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def _events(folder: Path) -> EventAccumulator:
    everything = EventAccumulator(
        str(folder), size_guidance=dict.fromkeys(("scalars", "images"), 0)
    )
    return everything.Reload()


def scalars(folder: Path) -> dict[str, dict[int, list[float]]]:
    """Return tag -> step -> the values that are shown at this step."""
    events, found = _events(folder), {}
    for tag in events.Tags()["scalars"]:
        found[tag] = defaultdict(list)
        for event in events.Scalars(tag):
            found[tag][event.step].append(event.value)
    return {tag: steps for tag, steps in found.items() if steps}


def pictures(folder: Path, tag: str) -> list[tuple[int, bytes]]:
    """Return (step, PNG) of each picture."""
    return [(event.step, event.encoded_image_string) for event in _events(folder).Images(tag)]
