"""End a command without a traceback after an error that the user can fix."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config import ConfigError
from megatron.ending import is_member
from megatron.engine.errors import FailedElsewhereError
from megatron.engine.job import failure
from megatron.entry import NOBODY_READS, output_has_no_reader
from megatron.errors import USER_ERRORS


@contextmanager
def user_errors() -> Iterator[None]:
    """Print an expected error of the `with` block, and exit with code 1, or 2 for a ConfigError.

    Expected errors are the errors in `USER_ERRORS` and errors about too little memory. Other errors
    are raised unchanged.

    Raises:
        SystemExit: The block has raised an expected error.
    """
    # In a job of several processes, any error in the block ends all processes.
    # See `failure` for the end of the other processes.
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and output_has_no_reader():
            if is_member():
                failure.end_process("error: nobody reads the output any more", code=NOBODY_READS)
            raise  # `entry.run` handles it
        code = 2 if isinstance(error, ConfigError) else 1
        if is_member():
            lost = failure.lost_contact(error)
            text = failure.LOST_TEXT if lost else _message(error)
            lost = lost or isinstance(error, FailedElsewhereError)
            failure.end_process(text, lost=lost, code=code)
        if not isinstance(error, USER_ERRORS) and not _is_out_of_memory(error):
            raise
        print(_message(error), file=sys.stderr)
        sys.exit(code)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the GPU or the machine has run out of memory."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _message(error: BaseException) -> str:
    if isinstance(error, USER_ERRORS):
        return str(error) if isinstance(error, ConfigError) else f"error: {error}"
    if _is_out_of_memory(error):
        return (
            f"error: not enough memory: {str(error).partition(chr(10))[0]}\nwrite a smaller model "
            "or train_micro_batch_size_per_gpu, or divide the model over more processes "
            "(zero_optimization.stage, model_parallel_size, pipe_parallel_size)"
        )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "".join(traceback.format_exception(error)).rstrip()
