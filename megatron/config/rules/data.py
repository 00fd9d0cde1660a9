"""Refuse data paths and weights that do not fit together, and unknown `builtin:` names."""

from megatron.config.builtin import CORPUS, PREFIX, TASK_TOKENIZER, TASKS, task_name
from megatron.config.rules.relation import Found, relation
from megatron.suggest import nearest

_SPLITS = ("train", "valid", "test")


@relation(*(f"{split}_data_{kind}" for kind in ("paths", "weights") for split in _SPLITS))
def _blended(*given: tuple) -> Found | None:
    """Return a problem if the data paths or sampling weights of the splits break GPT-NeoX's rules.

    Args:
        given: First the paths of the three splits, then the weights of the three splits.
    """
    # Paths must be given for all three splits (train, valid, test) or for none. If a split has
    # weights, it must have one weight for each path.
    paths, weights = given[:3], given[3:]
    if any(paths) and not all(paths):
        missing = [f"{split}_data_paths" for split, p in zip(_SPLITS, paths, strict=True) if not p]
        return "train_data_paths", f"needs {' and '.join(missing)} too; write all three"
    for split, p, w in zip(_SPLITS, paths, weights, strict=True):
        if w and len(w) != len(p):
            text = f"{len(w)} weights for {len(p)} paths; write one weight for each path"
            return f"{split}_data_weights", text


@relation("data_path", "train_data_paths")
def _one_way(path: str | tuple[str, ...], train: tuple[str, ...]) -> Found | None:
    if train:
        return "train_data_paths", "excludes data_path, but both are given; write one of the two"


@relation("data_path")
def _builtin(given: str | tuple[str, ...]) -> Found | None:
    for path in (given,) if isinstance(given, str) else given:
        if not path.startswith(PREFIX) or given == CORPUS or task_name(given):
            continue
        if path == CORPUS or task_name(path):
            return "data_path", f"{path} stands alone; write {path}, or prefixes"
        names = (CORPUS.removeprefix(PREFIX), *TASKS)
        near = nearest(path.removeprefix(PREFIX), names)
        write = ", ".join(PREFIX + name for name in ([near] if near else names))
        return "data_path", f"no builtin corpus is called {path!r}; write {write}, or a prefix"


@relation("data_path", "tokenizer_type", "task_options")
def _task(path: str | tuple[str, ...], tokenizer: str, options: dict) -> Found | None:
    task = task_name(path)
    if task and tokenizer != TASK_TOKENIZER:
        text = f"{tokenizer}, but builtin:{task} has a vocabulary of its own"
        return "tokenizer_type", f"{text}; drop this key"
    if not task and tokenizer == TASK_TOKENIZER:
        return "tokenizer_type", f"{tokenizer} belongs to length tasks such as builtin:copy"
    if options and not task:
        text = "given, but data_path names no length task"
        return "task_options", f"{text}; drop this key, or write e.g. data_path: builtin:copy"


@relation("data_path", "eval_context_baseline")
def _task_baseline(path: str | tuple[str, ...], context: int) -> Found | None:
    if task_name(path) and context:
        return "eval_context_baseline", "is for text, but data_path is a length task; drop this key"
