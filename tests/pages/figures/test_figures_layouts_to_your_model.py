"""Test that the figures of the pages about running and results are those of the code and the files.

`CONSTANTS` lists sentences with a constant or a default of the code. The other tests compute what
pages say about configs, tables and committed results. `test_documented_numbers.py` and
`test_documented_grids.py` hold the lab's tables to their files.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import signal

import pandas as pd
import pytest
import torch
import yaml
from scipy import stats

import train
from benchmarks.plan.plan_time import FIT
from megatron import cpu_settings, entry
from megatron.config import Config, ConfigError, load_config
from megatron.config.command_line import config_parser, load_or_exit
from megatron.config.mlp_width import inner_width
from megatron.data.tasks.registry import TASKS
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.async_save import SLOW_SAVE
from megatron.engine.job import join, lease
from megatron.engine.run_log.sinks import NEOX
from megatron.engine.training import bad_loss, step_log
from megatron.engine.training.speed import flops_per_token
from megatron.evaluation.suite.intervals import LEVEL
from megatron.hub.classes import CLASSES
from megatron.model import GPT
from megatron.plan import plan_text, search
from megatron.positional import ThetaParameter, load
from megatron.pretraining import readiness
from megatron.pretraining.retrofit import MOST_SAMPLES
from megatron.pretraining.run import MOST_ROLL_BACKS
from tests.distributed.matrix import STEPS
from tests.helpers.paths import CONFIGS, ROOT
from tests.pages.test_documented_numbers import one_line, rows
from tests.pages.test_words import LIMIT
from tests.pages.test_your_model import SMALL, SMALLER
from tests.parity.model_cases import TOLERANCES
from tests.parity.result import Result
from tools import check_parity, doctor
from tools.checkup.finding import PROBLEM, Finding

WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen"),
]
NEEDED = (
    "num_layers=1 hidden_size=64 num_attention_heads=1 seq_length=8 train_iters=1 data_path=none "
    "optimizer.params.lr=1 train_batch_size=1"
)
DEFAULTS = load_config([], NEEDED.split())
MUON = load_config([], [*NEEDED.split(), "optimizer.type=muon"])
QUICKSTART = load_config([CONFIGS / "quickstart.yml"])
OWN = load_config([CONFIGS / "recipes" / "own_160M.yml"])
LLAMA, MISTRAL = (
    yaml.safe_load((CONFIGS / name).read_text())
    for name in ("recipes/llama_7B.yml", "llama/mistral-7B.yml")
)
PROFILED = DEFAULTS.logging.profile_step_start, DEFAULTS.logging.profile_step_stop
KERNEL = {name: load(name).parameters for name in ("kerple_log", "kerple_log3", "kerple_power")}
PINNED = re.search(r"torch ([\d.]+) from PyPI is the CUDA ([\d.]+)",
                   (ROOT / "requirements.txt").read_text())  # fmt: skip
BATCH = (ROOT / "tools" / "slurm" / "train.sbatch").read_text()
SETTINGS = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", BATCH, re.M))


def word(count: int) -> str:
    return WORDS[count]


def exactly(number: float) -> str:
    return f"{number:g}".replace("e-0", "e-")


def parameters(config: Config, vocabulary: int) -> int:
    """Return the number of a model's parameters, without the few of its positional embedding."""
    plain = config.model.model_copy(update={"pos_emb": "none"})  # drawing theta takes seconds
    config = config.model_copy(update={"model": plain})
    with torch.device("meta"):
        model = GPT(plan_of(config, vocabulary, device_type="cpu", eod=0))
    return sum(each.numel() for each in model.parameters())


CONSTANTS = [
    ("layouts", "wait for at most {} minutes", join.LONGEST_WAIT),
    ("length_tasks", "`eval_examples` ({}) examples", DEFAULTS.evaluation.eval_examples),
    ("logs", "wandb shows {} metrics under", word(len(NEOX))),
    ("memory_and_speed", "the {} fastest layouts that fit", word(search.BEST)),
    ("memory_and_speed", "the {} fastest layouts even", word(search.BEST)),
    ("memory_and_speed", "at most {:.0%} of the GPU's memory", plan_text.USABLE),
    ("memory_and_speed", "The estimate of the time has {} parameters", word(len(FIT))),
    ("memory_and_speed", "each machine (default {})",
     inspect.signature(plan_text.plan_text).parameters["per_node"].default),
    ("memory_and_speed", "`profile_step_start` ({})", PROFILED[0]),
    ("memory_and_speed", "`profile_step_stop` ({})", PROFILED[1]),
    ("memory_and_speed", "`profile_step{}.json`", "{}-{}".format(*PROFILED)),
    ("memory_and_speed", "`profile_step{}.txt`", "{}-{}".format(*PROFILED)),
    ("moving_from_kerple", "slopes at {:g} |", load("kerple_power_original").parameters[0].low),
    ("own_code", "no bounds, and starts between 0 and {:g}.", ThetaParameter("m").scale),
    ("quickstart", "Python {}.{} or newer", *entry.OLDEST),
    ("results", "In float64, logits equal those", ""),
    ("results", "#check-it-yourself) to {}, and", exactly(TOLERANCES["fp64"]["logits"])),
    ("results", "and gradients to {}.", exactly(TOLERANCES["fp64"]["values"])),
    ("results", "loss, in nats with a {:.0f}% interval", LEVEL),
    ("resuming", "end with exit code {}.", DEFAULTS.training.preemption_exit_code),
    ("resuming", "leave `preemption_exit_code` at {}:", DEFAULTS.training.preemption_exit_code),
    ("resuming", "takes longer than {} s, the log warns", SLOW_SAVE),
    ("resuming", "at once, with exit code {}.", entry.INTERRUPTED),
    ("resuming", "every {:g} seconds (a heartbeat)", lease.HEARTBEAT),
    ("resuming", "starts {:g} seconds after the last heartbeat", lease.LIFETIME),
    ("resuming", "{} bad steps in a row", word(bad_loss.MOST_SKIPPED).title()),
    ("resuming", "at most {} times per checkpoint", word(MOST_ROLL_BACKS)),
    ("resuming", "rises by more than {:g} nats", step_log.STEEP),
    ("retrofit", "`kerple_log3` | p = {:g}, a = {:g}, r = {:g} |",
     *(each.gentle for each in KERNEL["kerple_log3"])),
    ("retrofit", "`kerple_log` or `kerple_log3` | p = {:g}, a = {:g},",
     *(each.gentle for each in KERNEL["kerple_log"])),
    ("retrofit", "`kerple_power` | a = {1:g}, p = {0:g} |",
     *(each.gentle for each in KERNEL["kerple_power"])),
    ("retrofit", "On at most {} samples", MOST_SAMPLES),
    ("training", "| `wsd_decay_ratio` | {:g} |", DEFAULTS.lr.wsd_decay_ratio),
    ("training", "| `lr_wsd_decay_style` | `{}` |", DEFAULTS.lr.wsd_decay_style),
    ("training", "uses `momentum` ({:g})", MUON.optimizer.momentum),
    ("troubleshooting", "torch {} from PyPI uses CUDA {} and", *PINNED.groups()),
    ("troubleshooting", "free after {:g} seconds", lease.LIFETIME),
    ("troubleshooting_runs", "ends with code {} or `Killed`", 128 + signal.SIGKILL),
    ("troubleshooting_runs", "`GOMP_SPINCOUNT` to {} or 0.", cpu_settings.SHORT_SPIN),
    ("troubleshooting_runs", "The time limit is {} minutes.", join.LONGEST_WAIT),
    ("your_model", "`--cpus-per-task` ({} by default)", SETTINGS["cpus-per-task"]),
    ("your_model", "{} minutes before the time limit",
     word(int(SETTINGS["signal"].partition("@")[2]) // 60).title()),
    ("your_model", "{} GPUs under Slurm", SETTINGS["gpus-per-node"]),
    ("../CONTRIBUTING", "have at most {:,} words", LIMIT),
    ("../tools/README", "(any of {} classes)", len(CLASSES)),
]  # fmt: skip
"""(page of docs/, sentence, the values of its braces)."""


@pytest.mark.parametrize(("page", "sentence", *"abc"), [(*x, "", "", "")[:5] for x in CONSTANTS])
def test_constants_and_defaults(page, sentence, a, b, c):
    assert sentence.format(a, b, c) in one_line(ROOT / "docs" / f"{page}.md")


def said(page: str, *sentences: str) -> None:
    text = one_line(ROOT / "docs" / f"{page}.md")
    assert [each for each in sentences if each not in text] == []


def test_exit_codes(monkeypatch, capsys):
    """1 after an error, a failed check or case, and 2 after a mistake in the config."""

    @entry.reports
    def fails() -> int:
        raise OSError

    given = [str(CONFIGS / "quickstart.yml"), "-o", "num_layers=no"]
    arguments = config_parser(None).parse_args(given)
    with pytest.raises(SystemExit) as refused:
        load_or_exit(arguments)
    both = f"is {refused.value.code} for a configuration error, and {fails()} for other errors"
    monkeypatch.setattr(doctor, "examine", lambda paths: [("disk", Finding(PROBLEM, "full"))])
    monkeypatch.setattr(readiness, "readiness", lambda config: [(True, "no text")])
    monkeypatch.setattr(train, "load_or_exit", lambda args, joins: DEFAULTS)
    wrong = Result("case", {"loss": (1.0, 0.0)})
    monkeypatch.setattr(check_parity, "cases", lambda args: [("case", lambda: wrong)])
    monkeypatch.setattr("sys.argv", ["train.py", "--check", given[0]])
    parity, checked = check_parity.main([str(ROOT)]), train.main()
    said("troubleshooting", both, f"exit code is {doctor.main([])} if there is a problem")
    said("training", f"disk space. If so, the exit code is {checked}.")
    said("moving_from_kerple", f"The exit code is {parity} if a case fails")
    said("../tools/README", f"exit code {parity} if one differs")


def test_layouts():
    names = re.findall(r"^tp(\S+)-cp(\S+)-pp(\S+)-dp(\d+)(?!\S*-(?:cross|layers)\S* ).* ok$",
                       (ROOT / "tests/distributed/matrix.log").read_text(), re.M)  # fmt: skip
    most = max(math.prod(int(re.match(r"\d+", size)[0]) for size in cell) for cell in names)
    change = (ROOT / "tests/distributed/test_change_layout.py").read_text()
    tolerance = re.search(r'tolerance = \S+ if "bf16" in old else (\S+)', change)[1]
    told = f"trained {len(names)} combinations of a layout, a model and a precision"
    said("layouts", f"in the old layout, to {tolerance}.")
    said("layouts", f"{told} for {word(STEPS)} steps, on up to {most} processes.")


def test_the_options_of_the_length_tasks():
    lines = (ROOT / "docs/length_tasks.md").read_text().splitlines()
    for name, task in TASKS.items():
        of = {each.name: str(each.default).lower() for each in dataclasses.fields(task)}
        least, most = of.pop("min_length"), of.pop("max_length")
        [line] = (line for line in lines if line.startswith(f"| `builtin:{name}` |"))
        assert line.endswith("| " + ", ".join(f"`{key}: {of[key]}`" for key in of) + " |")
        said("length_tasks", f"in addition to `min_length: {least}`, `max_length: {most}`")
    interval = inspect.signature(stats.binomtest(1, 2).proportion_ci).parameters
    said("length_tasks", f"with its {interval['confidence_level'].default:.0%} interval (Wilson)")
    found = pd.read_csv(ROOT / "docs/length_tasks/crosses.csv")
    sums = sum("+" in name for name in found["embedding"].unique())
    count, tasks = found["embedding"].nunique() - sums, found["task"].nunique()
    counts = f"{word(count)} embeddings and {word(sums)} sums of embeddings on all {word(tasks)}"
    said("length_tasks", f"compares {counts} tasks.")


def test_operations_of_a_token():
    shape = plan_of(QUICKSTART, 1024, device_type="cpu", eod=0).shape
    width, larger = shape.block.hidden_size, dataclasses.replace(shape, vocab_size=1025)
    weight = (flops_per_token(larger, 0) - flops_per_token(shape, 0)) / width
    key = (flops_per_token(shape, 1) - flops_per_token(shape, 0)) / width / shape.num_layers
    said("logs", f"counts {weight:g}, and attention counts {key:g} × layers × width × keys")


def test_stages_of_zero():
    with pytest.raises(ConfigError) as refused:
        load_config([], [*NEEDED.split(), "zero_optimization.stage=9"])
    least, most = re.search(r"from (\d) to (\d)", str(refused.value)).groups()
    said("training", f"sets the ZeRO stage, {least} to {most}.")


def test_inner_widths():
    llama, mistral = LLAMA["intermediate_size"], MISTRAL["intermediate_size"]
    multiple, kind = LLAMA["mlp_multiple_of"], LLAMA["activation"]
    width, wide = inner_width(kind, llama, multiple), inner_width("swiglu", mistral, 1)
    given = f"`intermediate_size: {llama}` and `mlp_multiple_of: {multiple}` with `{kind}` give"
    said("model_keys", f"{given} LLaMA's inner width of {width:,}.", f"For Mistral's {wide:,}")
    said("model_keys", f"write `intermediate_size: {mistral}`. gpt-neox's own file sets {wide}, "
         f"which gives {inner_width('swiglu', wide, 1):,}.")  # fmt: skip
    plain, geglu = (
        load_config([], [*NEEDED.split(), f"activation={name}"]).model for name in ("gelu", "geglu")
    )
    usual, gated = (each.intermediate_size // each.hidden_size for each in (plain, geglu))
    said("model_keys", f"The default is {usual} × `hidden_size` (for `geglu` {gated} ×)")


def test_defaults_of_the_published_code():
    table = rows(ROOT / "configs/README.md", "Defaults where the two code bases differ")
    dropout, decay, clipping, rate, stage = (
        next(row["published KERPLE code"] for row in table if row["key"].startswith(key))
        for key in ("attention_dropout", "weight_decay", "gradient_clipping", "optimizer.params.lr",
                    "zero_optimization")
    )  # fmt: skip
    theirs = f"{dropout}, {decay}, {clipping}, {stage.removeprefix('stage ')}, {rate}"
    optimizer, stage = DEFAULTS.optimizer, DEFAULTS.parallel.zero_stage
    ours = f"{DEFAULTS.model.hidden_dropout:g}, {optimizer.weight_decay}"
    ours += f", {optimizer.gradient_clipping}, {stage}, no default."
    said("moving_from_kerple", f"learning rate | {theirs} | {ours}")


def test_your_model():
    size, tokens = parameters(OWN, plan_text.GPT2_VOCABULARY), OWN.model.seq_length
    tokens *= OWN.batch.train_batch_size * OWN.training.train_iters
    each = f"{tokens / size:.0f} for each parameter"
    said("your_model", f"The run reads {tokens / 1e9:.1f} billion tokens, {each}.")
    said("your_model", f"a GPT of {round(size, -7) / 1e6:.0f} million parameters")
    train_part, valid, test = map(int, OWN.data.split.split(","))
    shares = f"gives {valid} of {train_part + valid + test:,} documents to validation and {test}"
    said("your_model", f"`split: {OWN.data.split}` {shares} to the test.")
    first, *_, last = (n // OWN.model.seq_length for n in OWN.evaluation.eval_lengths)
    said("your_model", f"perplexity at {first} to {last} times the training length")
    large, small = (
        {
            name.replace("=", " ").split()[0]: new.replace("=", " ").split()[-1]
            for name, new in pairs
        }
        for pairs in ([(name, name) for name in SMALLER], SMALLER.items())
    )
    layers = f"{word(SMALL['num_layers'])} layers of width {SMALL['hidden_size']}"
    vocabulary = f"{int(large['--size']):,} tokens"
    said("your_model", f"with a vocabulary of {vocabulary}")
    said("your_model", f"| {vocabulary} of the tokenizer | {small['--size']} |")
    workers, new = ((each["--workers"], each["--max-new-tokens"]) for each in (large, small))
    said("your_model", f"| {workers[0]} workers, {workers[1]} new tokens | {', '.join(new)} |")
    said("your_model", f"| {large['--gpus']} GPUs | {small['--gpus']} processes on a CPU")
    said("your_model", f"{layers}, {SMALL['seq_length']} tokens, a few")


def test_the_usual_changes():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## The usual changes\n")[1]
    changes = re.findall(r"^\*\*[^*]+\.\*\*", text.split("\n## ")[0], re.M)
    assert f"For {word(len(changes))} usual changes" in text
