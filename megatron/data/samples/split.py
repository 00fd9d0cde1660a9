"""Divide the documents of a data set into training, validation and test documents."""

import numpy as np

from megatron.data.errors import DataError

SPLITS = ("train", "valid", "test")


def split_documents(split: str, num_documents: int) -> list[tuple[int, int]]:
    """Divide documents into consecutive ranges for training, validation and test, as GPT-NeoX does.

    Args:
        split: Three weights such as "969, 30, 1", separated by `,` or `/`.
        num_documents: The number of documents to divide.

    Returns:
        The pairs (start, end) for training, validation and test. Each range includes document
        `start` and excludes document `end`.

    Raises:
        DataError: `split` is not a list of finite weights >= 0 with a sum above 0.
    """
    # Missing weights are 0, and weights after the third are ignored.
    separator = "," if "," in split else "/"
    try:
        weights = [float(part) for part in split.split(separator)]
    except ValueError:
        raise DataError(
            f"split: {split!r} is not a list of numbers; write three weights such as '969, 30, 1'"
        ) from None
    weights = (weights + [0.0, 0.0])[:3]
    total = sum(weights)
    if not np.isfinite(weights).all() or min(weights) < 0 or total <= 0:
        raise DataError(
            f"split: {split!r} needs finite weights >= 0 with a sum above 0, such as '969, 30, 1'"
        )
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + int(round(weight / total * float(num_documents))))
    surplus = bounds[-1] - num_documents
    # For very few documents, GPT-NeoX's correction can give a negative bound, and GPT-NeoX crashes.
    bounds = [0] + [max(0, bound - surplus) for bound in bounds[1:]]
    return [(bounds[i], bounds[i + 1]) for i in range(3)]
