"""Load positional embeddings by name. Each embedding is one file of this package.

`load("kerple_log")` imports `positional/kerple_log.py` and instantiates the only subclass of
`PositionalEmbedding` in that file. To add an embedding, add a file to this package and an entry to
`tests/positional/formulas64.py`. Nothing else changes.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

from megatron.embedding_names import OTHERS, POSITIONAL_ALIASES
from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.combination import Combination, PerLayer
from megatron.positional.theta_bounds import bounds, within_bounds
from megatron.positional.theta_parameter import ThetaParameter
from megatron.suggest import did_you_mean

__all__ = [
    "Combination",
    "PerLayer",
    "PositionalEmbedding",
    "PositionalError",
    "ThetaParameter",
    "bounds",
    "load",
    "names",
    "within_bounds",
]


OPTIONS = {bool: "true or false", int: "a whole number", float: "a number"}
"""Types of options, and what to write for each."""


def names() -> tuple[str, ...]:
    """Return the sorted names of all positional embeddings."""
    stems = {path.stem for folder in __path__ for path in Path(folder).glob("[!_]*.py")}
    # An embedding has the name of the file that defines it.
    return tuple(sorted(stems - OTHERS))


def load(name: str, *, numerics: Numerics = WIDE, **options: Any) -> PositionalEmbedding:
    """Build the positional embedding with this name.

    Args:
        name: The name of an embedding, or of several embeddings that act together, such as `rotary
            + kerple_log`. The released code's names also work, such as `kerple_power_ap_`.
        numerics: The rules by which the embedding rounds numbers.
        options: The embedding's options. For several embeddings, one dict of options for each
            embedding, under the embedding's name, such as `rotary={"factor": 2.0}`.

    Raises:
        PositionalError: There is no embedding with this name.
        PositionalError: Two of several embeddings do not work together.
        PositionalError: An option is unknown or has the wrong type.
    """
    if "+" in name:
        return _combination([term.strip() for term in name.split("+")], numerics, options)
    name = POSITIONAL_ALIASES.get(name, name)
    if name not in names():
        hint = did_you_mean(name, names()) + f"There are: {', '.join(names())}"
        raise PositionalError(f"no positional embedding {name!r}; {hint}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PositionalEmbedding)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise PositionalError(
            f"{module.__file__} must define exactly one PositionalEmbedding, it has {len(found)}"
        )
    parameters = inspect.signature(found[0].__init__).parameters
    known = [p for p in parameters if p not in ("self", "numerics")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        has = f"its options are {', '.join(known)}" if known else "it has no options"
        raise PositionalError(f"{name} has no option {', '.join(unknown)}; {has}")
    for option, value in options.items():
        kind = type(parameters[option].default)
        fits = isinstance(value, (int, float) if kind is float else kind)
        if kind in OPTIONS and not (fits and isinstance(value, bool) == (kind is bool)):
            expected = OPTIONS[kind]
            raise PositionalError(f"{name}: option {option} is {expected}, not {value!r}")
    return found[0](**options, numerics=numerics)


def _combination(
    terms: list[str], numerics: Numerics, options: dict[str, Any]
) -> PositionalEmbedding:
    if unknown := sorted(set(options) - set(terms)):
        raise PositionalError(
            f"{unknown[0]} is no term of {' + '.join(terms)}: write the options of each term under "
            f"its name, such as {{{terms[0]}: {{...}}}}"
        )
    return Combination([load(term, numerics=numerics, **options.get(term, {})) for term in terms])
