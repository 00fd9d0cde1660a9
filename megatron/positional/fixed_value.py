"""Define objects that are compared by their values, because caches use them as keys.

A backend compiles an embedding's formula once, and uses the compiled code for every equal
embedding. Therefore a program may create a new embedding object for each call. An embedding cannot
be changed, because the compiled code would still compute the old formula.
"""

import copy
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, Self


class _Fixed(type):
    """Metaclass of classes whose objects cannot be changed after their construction."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.fix()
        return made


class FixedValue(metaclass=_Fixed):
    """Base class of immutable objects that are equal if their class and attributes are equal.

    The attributes may be numbers, texts, frozen dataclasses, other `FixedValue` objects and tuples
    of these. An object with an attribute of another type is equal only to itself.
    """

    _key: Any
    _hash: int

    def changed(self, **attributes: Any) -> Self:
        """Return a copy of this object with the given attributes changed."""
        made = copy.copy(self)
        vars(made).update(attributes)
        made.fix()
        return made

    def fix(self) -> None:
        """Forbid later changes of the attributes."""
        fields = vars(self)
        fields.pop("_key", None)
        fields.pop("_hash", None)
        # The key that `==` compares.
        fields["_key"] = self.identity()
        fields["_hash"] = hash((type(self), fields["_key"]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # of a copy or a pickle, perhaps from another process
        self.fix()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_key" in self.__dict__:
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot change after construction, because "
                "compiled kernels would keep the old formula; make a new embedding"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FixedValue) or type(self) is not type(other):
            return False
        return self is other or self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def identity(self) -> Any:
        """Return a hashable value, by which `==` compares two objects of the same class."""
        values = tuple(sorted(vars(self).items()))
        return values if all(_is_plain(value) for _, value in values) else id(self)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    frozen = is_dataclass(value) and value.__hash__ is not None
    return frozen or isinstance(value, (bool, int, float, str, NoneType, FixedValue))
