"""Continue prompts with a trained model. Prompts with continuations go to stdout, logs to stderr.

Example: `python generate.py --load runs/quickstart --prompt "import " --temperature 0`.
"""

import argparse
import io
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

from megatron import entry, launcher
from megatron.config.command_line import config_parser, load_for_use_or_exit
from megatron.entry import number
from megatron.files import read_at_most

MOST_BYTES = 1 << 26
"""The most bytes of a file of prompts."""
MOST_CHARACTERS = 1 << 20
"""The most characters of a prompt; reading a longer one would take hours."""


def main() -> int:
    """Generate text with the settings on the command line.

    Returns:
        The exit code: 0 on success, 2 for a config error, 1 for another error that the user can
        fix.
    """
    args = parse_arguments()
    if args.interactive:  # the other processes of a job wait for each prompt: a week, in minutes
        os.environ.setdefault("DEEPSPEED_TIMEOUT", str(7 * 24 * 60))
    if not launcher.is_alone():
        import megatron.engine.job.failure  # noqa: F401  an error of one rank ends the job
    config = load_for_use_or_exit(args, args.load)
    from megatron.engine.job.error_messages import user_errors

    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(encoding="utf-8")
    with user_errors(), redirect_stdout(sys.stderr):  # libraries print to stdout, too
        from megatron.generation.continue_prompts import GenerationOptions, generate
        from megatron.generation.sampling import Sampling

        args.read_prompts, args.sampling = (lambda: asked(args)), named(Sampling, args)
        generate(
            config,
            args.load,
            named(GenerationOptions, args),
            lambda text: print(text, end="", file=out, flush=True),
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    return 0


def named(kind, args):
    """Return an object of the dataclass `kind` with the values of the options of the same names."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def parse_arguments() -> argparse.Namespace:
    parser = config_parser(__doc__, "[default: config.yml of the run]")
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="RUN", help="run folder")
    given = parser.add_mutually_exclusive_group()
    text = "may be repeated; without a prompt, a new document begins"
    given.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "one prompt per line; - reads stdin; FILE.jsonl: an object with `prompt` per line"
    given.add_argument("--prompts", metavar="FILE", help=text)
    text = "ask for a prompt again and again; Ctrl-D ends"
    given.add_argument("--interactive", action="store_true", help=text)
    text = "per prompt [1]"
    add("--num-samples", type=number(int, 1), dest="samples", default=1, metavar="N", help=text)
    add("--max-new-tokens", type=number(int, 1), default=128, metavar="N", help="[128]")
    add("--temperature", type=number(float, 0.0), default=1.0, metavar="T", help="0: greedy [1]")
    add("--top-k", type=number(int, 1), metavar="K", help="only the K most likely tokens")
    text = "only the most likely tokens that together have the probability P"
    add("--top-p", type=number(float, 0.0, 1.0), default=1.0, metavar="P", help=text)
    text = "only tokens that are at least P times as likely as the most likely one"
    add("--min-p", type=number(float, 0.0, 1.0), default=0.0, metavar="P", help=text)
    text = "divides positive logits of tokens that the text has, multiplies negative ones [1]"
    add("--repetition-penalty", type=number(float, 0.01), default=1.0, metavar="R", help=text)
    text = "end before TEXT; repeatable"
    add("--stop", action="append", dest="stops", default=[], metavar="TEXT", help=text)
    add("--endless", action="store_true", help="never choose a token that ends texts")
    add("--seed", type=int, default=0, help="of the random numbers [0]")
    add("--batch-size", type=number(int, 1), default=8, metavar="N", help="prompts at a time [8]")
    text = "one JSON object per prompt and line"
    add("--json", action="store_true", dest="as_json", help=text)
    args = parser.parse_intermixed_args()
    if "" in args.stops:
        parser.error("--stop needs a text that is not empty")
    return args


def asked(args):
    """Return the prompts that the options name. None means no prompt, or the end of input."""
    if not args.interactive:
        return read_prompts(args.prompts) if args.prompts else args.prompt
    print("> ", end="", file=sys.stderr, flush=True)
    lines = (line.rstrip("\r\n") for line in iter(sys.stdin.readline, ""))
    return next(([line] for line in lines if line), None)


def read_prompts(name):
    """Return the prompts in the file `name`: one per line, or one per object of a JSONL file.

    Raises:
        DataError: A line of a JSONL file is no object with a text `prompt` or `text`.
    """
    from megatron.data.errors import DataError

    lines, prompts = read_lines(name), []
    if not name.endswith(".jsonl"):
        return lines
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
        if not isinstance(prompt, str):
            example = '{"prompt": "first line\\nsecond line"}'
            raise DataError(f"--prompts {name}:{place}: has no prompt; write {example}")
        prompts.append(prompt)
    return prompts


def read_lines(name):
    """Return the lines of the UTF-8 file `name`, or of stdin if `name` is `-`.

    Raises:
        DataError: The text cannot be read, is not UTF-8, or is too long.
    """
    from megatron.data.errors import DataError

    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            lines = read_at_most(file, MOST_BYTES).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {name}: is not UTF-8 ({error})") from None
    except OSError as error:
        raise DataError(f"--prompts {name}: {error}") from None
    for place, line in enumerate(lines, 1):
        if len(line) > MOST_CHARACTERS:
            why = f"has {len(line):,} characters, and a prompt has at most {MOST_CHARACTERS:,}"
            raise DataError(f"--prompts {name}:{place}: {why}; write one prompt per line")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


if __name__ == "__main__":
    entry.run(main)
