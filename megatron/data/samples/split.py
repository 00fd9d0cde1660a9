"""Divide the documents of a data set into training, validation and test documents."""

SPLITS = ("train", "valid", "test")
NO_VALIDATION = "; no document to validate on"


def split_documents(split: str, num_documents: int) -> list[tuple[int, int]]:
    """Divide documents into consecutive ranges for training, validation and test, as GPT-NeoX does.

    Args:
        split: Up to three weights such as "969, 30, 1", separated by `,` or `/`. The config has
            checked that all weights are finite, no weight is negative, and the sum is above 0.
        num_documents: The number of documents to divide.

    Returns:
        The pairs (start, end) for training, validation and test. Each range includes document
        `start` and excludes document `end`.
    """
    weights = [float(part) for part in split.replace("/", ",").split(",")]
    weights += [0.0] * (3 - len(weights))  # missing weights are 0
    total, bounds = sum(weights), [0]
    for weight in weights:
        bounds.append(bounds[-1] + int(round(weight / total * float(num_documents))))
    surplus = bounds[-1] - num_documents
    # For very few documents, GPT-NeoX's correction can give a negative bound, and GPT-NeoX crashes.
    bounds = [0] + [max(0, bound - surplus) for bound in bounds[1:]]
    return [(bounds[i], bounds[i + 1]) for i in range(3)]
