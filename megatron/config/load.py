"""Load config files and overrides into a `Config`, or report all problems at once.

The steps are:

1. Read each file and override (`reader`), and merge their settings. Later settings win.
2. Translate GPT-NeoX's keys into fields (`neox`).
3. Validate each field by itself (`fields`, pydantic).
4. Derive missing fields (`derived`) and check the rules between fields (`rules`).
5. Build the `Config` (`schema`).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from megatron.config.builtin import TASK_TOKENIZER, task_name
from megatron.config.derived import derive
from megatron.config.errors import ConfigError, Problem
from megatron.config.fields import show
from megatron.config.neox.dialect import translate
from megatron.config.neox.known_keys import KEY_OF
from megatron.config.neox.translation import Translation
from megatron.config.reader import Given, Settings, merge, read_file, read_override
from megatron.config.rules.relation import broken
from megatron.config.schema import SECTIONS, Config
from megatron.shipped import find

_FIELDS = {
    name: info for section in SECTIONS.values() for name, info in section.model_fields.items()
}
# Maps each required field to an example for the error message.
_REQUIRED = {
    "num_layers": "num_layers: 12",
    "hidden_size": "hidden_size: 768",
    "num_attention_heads": "num_attention_heads: 12",
    "seq_length": "seq_length: 512",
    "train_iters": "train_iters: 50000, or 0 to evaluate only",
    "lr": "optimizer: {type: Adam, params: {lr: 6e-4}}",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu: 32, or train_batch_size",
}


def load_config(
    files: Sequence[str | Path], overrides: Sequence[str] = (), *, world_size: int | str = 1
) -> Config:
    """Load a config from YAML files and overrides, for a given number of processes.

    Later files take precedence over earlier files. Overrides take precedence over files.

    Args:
        files: The YAML files. A name without `.yml`, and the name of a config that comes with the
            project, such as `quickstart`, are also accepted.
        overrides: Texts of the form `key=value`, as after `-o` on the command line.
        world_size: The number of processes, as an int or as the text of WORLD_SIZE.

    Raises:
        ConfigError: The config has problems. The error lists all problems with their places.
    """
    # Mappings are merged key by key at every level. The value null removes a key. The place of a
    # problem is its file, line and key if these are known.
    if not str(world_size).isdecimal() or int(world_size) < 1:
        text = f"the number of processes, is {str(world_size)!r}; unset it, or start with torchrun"
        raise ConfigError([Problem(None, "WORLD_SIZE", text)])
    files = [find(file) for file in files]
    settings: Settings = {}
    problems: list[Problem] = []
    for found, wrong in [*map(read_file, files), *map(read_override, overrides)]:
        problems += wrong
        settings = merge(settings, found)
    readable = not problems

    translation = translate(settings)
    problems += translation.problems
    given = translation.given
    values, wrong = _validate(given)
    problems += wrong
    _choose_tokenizer(given, values)
    for name, text in [*derive(values, int(world_size)), *broken(values)]:
        problems.append(_problem(name, text, given))
    if readable:  # a key that seems missing may be in text that could not be read
        problems += _missing(given, files)
    if problems:
        names = (*map(str, files), *(f"-o {text}" for text in overrides))
        order = {name: position for position, name in enumerate(names)}
        raise ConfigError(sorted(dict.fromkeys(problems), key=lambda p: _place(p, order)))
    return _build(values, translation, tuple(map(str, files)))


def _missing(given: dict[str, Given], files: Sequence[str | Path]) -> list[Problem]:
    names = ", ".join(str(file) for file in files) or "any file"
    batch = "train_micro_batch_size_per_gpu"
    return [
        _problem(name, f"required, but not in {names}; write e.g. {example}", given)
        for name, example in _REQUIRED.items()
        if name not in given and not (name == batch and "train_batch_size" in given)
    ]


def _place(problem: Problem, order: dict[str, int]) -> tuple[int, int]:
    """Return a sort key of `problem`: the position of its file or override, and its line.

    Args:
        order: Maps each file and override to its position.
    """
    if problem.mark is None:
        return len(order) + 1, 0
    return order.get(problem.mark.file, len(order)), problem.mark.line or 0


def _problem(name: str, text: str, given: dict[str, Given]) -> Problem:
    mark = given[name].mark if name in given else None
    return Problem(mark, KEY_OF[name] or name, text)


@cache
def _adapter(name: str) -> TypeAdapter:
    """Return the pydantic validator of the config field `name`."""
    annotated: Any = Annotated[_FIELDS[name].annotation, _FIELDS[name]]
    return TypeAdapter(annotated)


def _validate(given: dict[str, Given]) -> tuple[dict[str, Any], list[Problem]]:
    """Check each given setting, and add the defaults of the fields that are not given.

    Returns:
        (values by field name, problems).
    """
    # Invalid fields are left out. Derived fields that the user did not set are None.
    values: dict[str, Any] = {
        name: info.get_default(call_default_factory=True)
        for name, info in _FIELDS.items()
        if not info.is_required()
    }
    problems = []
    for name, setting in given.items():
        try:
            values[name] = _adapter(name).validate_python(setting.value)
        except ValidationError as error:
            values.pop(name, None)
            texts = dict.fromkeys(_text(detail, setting.value) for detail in error.errors())
            problems += [_problem(name, text, given) for text in texts]
    return values, problems


def _text(detail: Any, value: Any) -> str:
    """Return the error text for an invalid value.

    Args:
        detail: The details of the error, from pydantic.
        value: The invalid value.
    """
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"got {show(value)}; {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _choose_tokenizer(given: dict[str, Given], values: dict[str, Any]) -> None:
    """Select the tokenizer for a built-in text or a length task, if the user names no tokenizer."""
    # The text is built in if `data_path` starts with `builtin:`.
    path = values.get("data_path")
    if isinstance(path, str) and path.startswith("builtin:") and "tokenizer_type" not in given:
        values["tokenizer_type"] = TASK_TOKENIZER if task_name(path) else "ByteLevelTokenizer"


def _build(values: dict[str, Any], translation: Translation, sources: tuple[str, ...]) -> Config:
    sections: dict[str, Any] = {
        section: cls(**{name: values[name] for name in cls.model_fields})
        for section, cls in SECTIONS.items()
    }
    marks = {name: setting.mark for name, setting in translation.given.items()} | translation.inner
    origins = {name: str(mark) for name, mark in marks.items()}
    return Config(**sections, notes=tuple(translation.notes), sources=sources, origins=origins)
