"""Read TensorBoard's event files as TensorBoard does."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def _events(folder: Path) -> EventAccumulator:
    everything = EventAccumulator(
        str(folder), size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0)
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


def chart(name: str) -> str:
    """Return the chart of a metric: losses are in the first group, final results in the last."""
    group, _, rest = name.partition("/")
    if name == "train/loss":
        return "1_loss/train"
    if group == "validation" and rest.startswith("loss"):
        return f"1_loss/validation{rest[4:]}"
    return {"validation": "2_", "train": "3_", "theta": "4_", "final": "9_"}.get(group, "5_") + name


def texts(folder: Path) -> dict[str, str]:
    """Return tag -> the last text of this tag."""
    events = _events(folder)
    found = {tag: events.Tensors(tag)[-1] for tag in events.Tags()["tensors"]}
    return {
        tag.removesuffix("/text_summary"): event.tensor_proto.string_val[0].decode()
        for tag, event in found.items()
    }


def pictures(folder: Path, tag: str) -> list[tuple[int, bytes]]:
    """Return (step, PNG) of each picture."""
    return [(event.step, event.encoded_image_string) for event in _events(folder).Images(tag)]
