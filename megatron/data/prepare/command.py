"""Flags, error messages and exit codes that the two commands for preparing data share."""

import argparse
import signal
import sys
from collections.abc import Callable

from megatron import entry
from megatron.data.prepare.chunks import Limits
from megatron.data.tokenizers.fast_bpe import BACKENDS
from megatron.preemption import SIGNALS


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the commands for preparing data share."""
    # These are --backend, --ftfy, --on-error, --max-document-bytes and --max-expansion.
    add, limits = parser.add_argument, Limits()
    text = "library that encodes for GPT2BPETokenizer; the ids are the same [%(default)s]"
    add("--backend", help=text, choices=BACKENDS, default="auto")
    text = "repair the text's encoding first, with the library ftfy"
    add("--ftfy", help=text, action="store_true")
    text = "at a faulty record: stop, or skip, count and list it [%(default)s]"
    add("--on-error", help=text, choices=["stop", "skip"], default="stop")
    text = "largest size of one document or record; larger ones are faulty [%(default)s]"
    add("--max-document-bytes", help=text, type=int, default=limits.document_bytes, metavar="N")
    text = "an input that decompresses to more than N times its size is faulty [%(default)g]"
    add("--max-expansion", help=text, type=float, default=limits.expansion, metavar="N")


def exit_code(command: Callable[[], int]) -> int:
    """Run `command`, and turn its errors into a message and an exit code.

    Returns:
        The return value of `command`, 1 after an error, or 130 after a signal such as Ctrl-C.
    """
    # A UserError or OSError is printed without a traceback. The signals are Ctrl-C, SIGTERM and
    # SIGUSR1.
    for number in {*SIGNALS} - {signal.SIGINT}:  # which a shell's background jobs ignore
        signal.signal(number, signal.default_int_handler)
    try:
        return entry.reports(command)()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return entry.INTERRUPTED
