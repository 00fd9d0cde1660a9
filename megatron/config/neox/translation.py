"""Collect the results of translating GPT-NeoX's keys: values of fields, notes and problems."""

from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import Mark, Problem
from megatron.config.fields import Check
from megatron.config.reader import Given


@dataclass
class Translation:
    """The result of translating GPT-NeoX's keys.

    Attributes:
        given: Maps the name of a field to the field's value and the place where the value is
            written.
        inner: Maps the dotted name of an entry in a field, such as "theta_init.bias_p", to the
            place where the entry is written.
        notes: Remarks for the user about accepted keys, for example that a key has no effect.
        problems: The errors in the keys and values.
    """

    # `inner` has the name FIELD.ENTRY for each entry ENTRY of a field FIELD whose value is a
    # mapping.

    given: dict[str, Given] = field(default_factory=dict)
    inner: dict[str, Mark] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, mark: Mark | None, key: str, text: str) -> None:
        self.problems.append(Problem(mark, key, text))

    def note(self, key: str, value: Any, reason: str) -> None:
        """Add a note that `key` has no effect. If `value` is false or empty, add nothing.

        Args:
            key: The dotted key.
            value: The value of the key.
            reason: The reason why the key has no effect.
        """
        if value not in (False, None) and value != [] and value != {}:
            self.notes.append(f"{key}: accepted, without effect here ({reason})")

    def check(self, key: str, given: Given, check: Check) -> Any:
        """Check the value of a key, and return the checked value.

        If the value is invalid, add a problem and return None.

        Args:
            key: The dotted key.
            given: The value and its place.
            check: A function that returns the checked value or raises ValueError.
        """
        try:
            return check(given.value)
        except ValueError as error:
            self.problem(given.mark, key, str(error))
