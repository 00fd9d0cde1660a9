"""Test that the constants and the defaults that pages mention are those of the code."""

from __future__ import annotations

import inspect
import re
import signal

import pytest

import generate
from benchmarks import attention_report, attention_tiles, train_step
from benchmarks.host import launch_time
from benchmarks.plan.plan_time import FIT
from benchmarks.trial import goals, measurements
from megatron import cpu_settings, entry
from megatron.attention import fused
from megatron.data.prepare import chunks
from megatron.data.shards import fingerprint
from megatron.data.tokenizers import fast_bpe
from megatron.engine.checkpoint.async_save import SLOW_SAVE
from megatron.engine.job import join, lease
from megatron.engine.run_log.sinks import NEOX
from megatron.engine.training import bad_loss, step_log
from megatron.evaluation.suite import heads, intervals, pointer, recall
from megatron.hub import export, padded_call
from megatron.hub.classes import CLASSES
from megatron.plan import plan_text, search
from megatron.positional import ThetaParameter, load
from megatron.pretraining.retrofit import MOST_SAMPLES
from megatron.pretraining.run import MOST_ROLL_BACKS
from tests.helpers.paths import ROOT
from tests.pages.figures.held import constant, says, scientific, smallest, word
from tests.parity import model_cases, training_cases
from tools import lm_eval
from tools.experiments.description import Description

DEFAULTS, MUON = smallest(), smallest("optimizer.type=muon").optimizer
RESUMED, PARITY = DEFAULTS.training, model_cases.TOLERANCES["fp64"]
LIMITS, RULES = "tests/test_limits.py", "tests/test_architecture.py"
FLOORS = constant(RULES, "FLOORS").values()
PROFILED = DEFAULTS.logging.profile_step_start, DEFAULTS.logging.profile_step_stop
GENTLE = {name: [each.gentle for each in load(name).parameters]
          for name in ("kerple_log", "kerple_log3", "kerple_power")}  # fmt: skip
PINNED = re.search(r"torch ([\d.]+) from PyPI is the CUDA ([\d.]+)",
                   (ROOT / "requirements.txt").read_text())  # fmt: skip
BATCH = (ROOT / "tools" / "slurm" / "train.sbatch").read_text()
SETTINGS = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", BATCH, re.M))
HASHED, BLOCK = (vars(fingerprint)[name] for name in ("_BLOCKS", "_BLOCK_BYTES"))
CONSTANTS = [
    ("../README", "logits to {}]", scientific(PARITY["logits"])),
    ("../README", "to {} in float64, gradients", scientific(PARITY["logits"])),
    ("../README", "gradients to {}, and", scientific(PARITY["values"])),
    ("../README", "training curves to {} in fp32", scientific(training_cases.TOLERANCES["fp32"])),
    ("../README", "Linux and Python {}.{} or newer", *entry.OLDEST),
    ("../ARCHITECTURE", "a floor, F{} to F{}.", min(FLOORS), max(FLOORS)),
    ("../ARCHITECTURE", "in at most {} files.", constant(RULES, "MOST_ENGINE_FILES")),
    ("../ARCHITECTURE", "has at most {} lines", constant(LIMITS, "MAX_LINES")),
    ("../ARCHITECTURE", "function at most {} lines", constant(LIMITS, "MAX_FUNCTION")),
    ("../ARCHITECTURE", "A folder has at most {} files", constant(LIMITS, "MAX_FILES")),
    ("../ARCHITECTURE", "message, with exit code {}.", entry.NOBODY_READS),
    ("attention", "head sizes 1 to {} and any length", fused.MAX_HEAD_SIZE),
    ("cluster", "(default {}), the processes", DEFAULTS.parallel.heartbeat_timeout),
    ("cluster", "ends after at most {} minutes", join.LONGEST_WAIT),
    ("data", "a data set of up to {} MiB, it", HASHED * BLOCK >> 20),
    ("data", "covers only {} blocks", HASHED),
    ("data", "-bytes` | {} GiB |", chunks.Limits().document_bytes >> 30),
    ("data", "`--max-expansion` | {0:g} | an input that decompresses to more than {0:g} times its "
     "size", chunks.Limits().expansion),
    ("data", "size, and to more than {} MiB", chunks.ALWAYS_ALLOWED >> 20),
    ("data", "one text in {}.", fast_bpe.CHECK_EVERY),
    ("evaluation", "tokens (default {})", DEFAULTS.evaluation.eval_suite_tokens),
    ("evaluation", "a {:.0f}% interval by bootstrap", intervals.LEVEL),
    ("evaluation", "With fewer than {}, there", intervals.FEWEST),
    ("evaluation", "within {:g} nats of 0.", intervals.SMALLEST),
    ("evaluation", "gain is above {:g} nats.", recall.NOTICEABLE),
    ("evaluation", "the last {}, {} or {} tokens", *pointer.ORDERS),
    ("evaluation", "more than {:.0%} of their attention", heads.COLLAPSED),
    ("experiments", "train one cell; {} by default", Description.model_fields["processes"].default),
    ("experiments", "level; {} by default", Description.model_fields["alpha"].default),
    ("generation", "At most {} MiB", generate.MOST_BYTES >> 20),
    ("generation", "{:,} characters per line", generate.MOST_CHARACTERS),
    ("gpu", "errors of {} variants of", len(measurements.CASES)),
    ("gpu", "at {} to {:,} tokens,", min(attention_report.GOALS), max(attention_report.GOALS)),
    ("gpu", "| {:g} times, {:g} times, {} times as fast",
     *(least for *_, least in train_step.GOALS["cuda"])),
    ("gpu", "{:.0%} of the matmul rate", goals.MATMUL_SHARE),
    ("gpu", "| {} µs forward, {} µs forward and", *launch_time.GOALS.values()),
    ("gpu", "more than {:.0f}% faster", 100 * (1 - attention_tiles.WORTH)),
    ("gpu", "memory at {:,} tokens", constant("tests/gpu/test_gpu_memory.py", "LONG")),
    ("gpu", "needs up to {} GB of GPU memory",
     re.search(r"about (\d+) GB", (ROOT / "tests/gpu/test_gpu_memory.py").read_text())[1]),
    ("gpu", "compute capability {}.{} or newer", *fused.OLDEST),
    ("gpu", "the fused kernels need triton {},", fused.SAFE_ON_HOPPER),
    ("huggingface", "more than {} GB are split", vars(export)["_SHARD"].removesuffix("GB")),
    ("huggingface", "`max_position_embeddings` is {:,},", export.UNLIMITED),
    ("huggingface", "by more than {} ({} in", *map(scientific, export.TOLERANCE.values())),
    ("huggingface", "for blocks of {} queries", padded_call.BLOCK),
    ("install", "Linux with Python {}.{} or newer", *entry.OLDEST),
    ("install", "kernels need [Triton {}](", fused.SAFE_ON_HOPPER),
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
    ("memory_and_speed", "`profile_step{}-{}.json`", *PROFILED),
    ("memory_and_speed", "`profile_step{}-{}.txt`", *PROFILED),
    ("moving_from_kerple", "slopes at {:g} |", load("kerple_power_original").parameters[0].low),
    ("own_code", "no bounds, and starts between 0 and {:g}.", ThetaParameter("m").scale),
    ("quickstart", "Python {}.{} or newer", *entry.OLDEST),
    ("results", "In float64, logits equal those of [the released code](moving_from_kerple.md#check-"
     "it-yourself) to {}, and gradients to {}.",
     scientific(PARITY["logits"]), scientific(PARITY["values"])),
    ("results", "loss, in nats with a {:.0f}% interval", intervals.LEVEL),
    ("resuming", "end with exit code {}.", RESUMED.preemption_exit_code),
    ("resuming", "leave `preemption_exit_code` at {}:", RESUMED.preemption_exit_code),
    ("resuming", "takes longer than {} s, the log warns", SLOW_SAVE),
    ("resuming", "at once, with exit code {}.", entry.INTERRUPTED),
    ("resuming", "every {:g} seconds (a heartbeat)", lease.HEARTBEAT),
    ("resuming", "starts {:g} seconds after the last heartbeat", lease.LIFETIME),
    ("resuming", "{} bad steps in a row", word(bad_loss.MOST_SKIPPED).title()),
    ("resuming", "at most {} times per checkpoint", word(MOST_ROLL_BACKS)),
    ("resuming", "rises by more than {:g} nats", step_log.STEEP),
    ("retrofit", "`kerple_log3` | p = {:g}, a = {:g}, r = {:g} |", *GENTLE["kerple_log3"]),
    ("retrofit", "`kerple_log` or `kerple_log3` | p = {:g}, a = {:g},", *GENTLE["kerple_log"]),
    ("retrofit", "`kerple_power` | a = {1:g}, p = {0:g} |", *GENTLE["kerple_power"]),
    ("retrofit", "On at most {} samples", MOST_SAMPLES),
    ("training", "| `wsd_decay_ratio` | {:g} |", DEFAULTS.lr.wsd_decay_ratio),
    ("training", "| `lr_wsd_decay_style` | `{}` |", DEFAULTS.lr.wsd_decay_style),
    ("training", "uses `momentum` ({:g})", MUON.momentum),
    ("troubleshooting", "torch {} from PyPI uses CUDA {} and", *PINNED.groups()),
    ("troubleshooting", "free after {:g} seconds", lease.LIFETIME),
    ("troubleshooting_runs", "ends with code {} or `Killed`", 128 + signal.SIGKILL),
    ("troubleshooting_runs", "`GOMP_SPINCOUNT` to {} or 0.", cpu_settings.SHORT_SPIN),
    ("troubleshooting_runs", "The time limit is {} minutes.", join.LONGEST_WAIT),
    ("your_model", "`--cpus-per-task` ({} by default)", SETTINGS["cpus-per-task"]),
    ("your_model", "{} minutes before the time limit",
     word(int(SETTINGS["signal"].partition("@")[2]) // 60).title()),
    ("your_model", "{} GPUs under Slurm", SETTINGS["gpus-per-node"]),
    ("../CONTRIBUTING", "have at most {:,} words", constant("tests/pages/test_words.py", "LIMIT")),
    ("../tools/README", "(any of {} classes)", len(CLASSES)),
]  # fmt: skip
"""(page from docs/, sentence, the values of its braces)."""


@pytest.mark.parametrize(
    ("page", "sentence", "values"), [(page, text, values) for page, text, *values in CONSTANTS]
)
def test_constants_and_defaults(page, sentence, values):
    says(page, sentence.format(*values))


@pytest.mark.parametrize(
    ("page", "sentence", "option", "command", "given"),
    [
        ("evaluation", "(default {}), `--seed`", "batch_size", lm_eval, "RUN --tasks lambada"),
        ("generation", "tokens, {} by default", "max_new_tokens", generate, "--load RUN"),
    ],
)
def test_defaults_of_options(page, sentence, option, command, given, monkeypatch):
    monkeypatch.setattr("sys.argv", [command.__name__, *given.split()])
    says(page, sentence.format(getattr(command.parse_arguments(), option)))
