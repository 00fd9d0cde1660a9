"""Errors that the user can fix end in one message; others keep their traceback."""

import pytest
import torch

from megatron.engine.job.error_messages import user_errors


@pytest.mark.parametrize("elements", [10**14, 10**17])
def test_memory_that_is_not_there_is_named_without_a_traceback(elements, capsys):
    with pytest.raises(SystemExit) as end, user_errors():
        torch.empty(elements)
    assert end.value.code == 1
    text = capsys.readouterr().err
    assert text.startswith("error: not enough memory: ")
    assert "write a smaller model" in text and "Traceback" not in text


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="a defect"), user_errors():
        raise RuntimeError("a defect")
