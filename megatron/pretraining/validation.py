"""Validate during training, and repeat a validation that an earlier job did not complete."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron import preemption
from megatron.engine.run_log.log import RunLog
from megatron.engine.run_log.rows import described, perplexities
from megatron.engine.training.hooks import Hook, Step


class Validation(Hook):
    """A hook that runs the validations during training and logs their metrics.

    Args:
        measure: A function that runs the validation after a step, and returns its metrics.
    """

    # If `measure` raises `preemption.Leave`, the job ends after a checkpoint. If a job ends before
    # a validation is complete, the resumed run repeats the validation before its first step.

    def __init__(self, measure: Callable[[int], dict[str, float]], log: RunLog):
        self._measure, self._log = measure, log

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._owed = is_owed(state)

    def state(self) -> dict[str, Any]:
        return {"owes_validation": True} if self._owed else {}

    def begin(self, step: int) -> None:
        """Run the validation after `step` if an earlier job ended before completing it.

        Raises:
            Leave: This job ends before the validation is complete.
        """
        # The earlier job saved its checkpoint before the validation.
        if self._owed:
            self._log.go_back(step, validates_again=True)
            self._validate(step)

    def after_step(self, step: Step) -> None:
        self._owed = step.validates
        if self._owed and not step.leaves:
            try:
                self._validate(step.number)
            except preemption.Leave:
                step.leaves = True

    def _validate(self, step: int) -> None:
        if found := self._measure(step):
            text = f"  validation at step {step}: {described(found)}"
            self._log.metrics(step, found | perplexities(found), text)
        self._owed = False


def is_owed(state: Mapping[str, Any]) -> bool:
    """Return whether a validation is owed: it was not complete when a checkpoint was saved.

    Args:
        state: The state of all hooks in the checkpoint.
    """
    return bool(state.get("owes_validation"))
