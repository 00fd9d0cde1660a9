"""Test that the figures of README, Architecture and half of the guides are those of the code.

`CONSTANTS` lists sentences with a constant or a default of a file, which is read and not imported.
The other tests compute what the pages say about configs, embeddings and committed results.
"""

from __future__ import annotations

import ast
import json
import math
import re
from argparse import Namespace
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.trial.goals import KINDS
from evaluate import suite_lengths
from megatron import entry
from megatron.config import load_config
from megatron.config.command_line import load_or_exit
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.engine.build import plan_of
from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Sample
from megatron.model import GPT
from megatron.positional import load
from megatron.rehearsal.rehearse import RehearsalError
from tests.checks.test_versions import bounds, pins, ranges
from tests.engine.test_published_sizes import PYTHIA
from tests.helpers.paths import CONFIGS, ROOT
from tests.pages.test_documented_grids import perplexities
from tests.pages.test_documented_numbers import one_line, rows
from tools import sweep
from tools.experiments.grid import read_grid

PARITY, TOLERANCE = "tests/parity/model_cases.py", "power(TOLERANCES['fp64']['{}'])"
RULES, LIMITS = "tests/test_architecture.py", "tests/test_limits.py"
FUSED, EXPORT = "megatron/attention/fused.py", "megatron/hub/export.py"
DATA, SUITE = "megatron/data/", "megatron/evaluation/suite/"
SECTIONS, GRIDS = "megatron/config/sections/", "tools/experiments/"
SMALL = read_grid(CONFIGS / "paper" / "stand_in.yml")
CONSTANTS = [
    ("../README", "logits to {}]", PARITY, TOLERANCE.format("logits")),
    ("../README", "to {} in float64, gradients", PARITY, TOLERANCE.format("logits")),
    ("../README", "gradients to {}, and", PARITY, TOLERANCE.format("values")),
    ("../README", "training curves to {} in fp32", "tests/parity/training_cases.py",
     "power(TOLERANCES['fp32'])"),
    ("../README", "Linux and Python {}.{} or newer", "megatron/entry.py", "OLDEST"),
    ("../ARCHITECTURE", "a floor, F{} to F{}.", RULES, "0, max(FLOORS.values())"),
    ("../ARCHITECTURE", "in at most {} files.", RULES, "MOST_ENGINE_FILES"),
    ("../ARCHITECTURE", "has at most {} lines", LIMITS, "MAX_LINES"),
    ("../ARCHITECTURE", "function at most {} lines", LIMITS, "MAX_FUNCTION"),
    ("../ARCHITECTURE", "A folder has at most {} files", LIMITS, "MAX_FILES"),
    ("../ARCHITECTURE", "message, with exit code {}.", "megatron/entry.py", "NOBODY_READS"),
    ("attention", "head sizes 1 to {} and any length", FUSED, "MAX_HEAD_SIZE"),
    ("cluster", "(default {}), the processes", SECTIONS + "parallel.py", "heartbeat_timeout"),
    ("cluster", "ends after {} minutes", "megatron/engine/job/join.py", "LONGEST_WAIT"),
    ("data", "a data set of up to {} MiB, it", DATA + "shards/fingerprint.py",
     "_BLOCKS * _BLOCK_BYTES >> 20"),
    ("data", "covers only {} blocks", DATA + "shards/fingerprint.py", "_BLOCKS"),
    ("data", "-bytes` | {} GiB |", DATA + "prepare/chunks.py", "document_bytes >> 30"),
    ("data", "`--max-expansion` | {0:g} | an input that decompresses to more than {0:g} times its "
     "size", DATA + "prepare/chunks.py", "expansion"),
    ("data", "size, and to more than {} MiB", DATA + "prepare/chunks.py", "ALWAYS_ALLOWED >> 20"),
    ("data", "one text in {}.", DATA + "tokenizers/fast_bpe.py", "CHECK_EVERY"),
    ("evaluation", "tokens (default {})", SECTIONS + "data.py", "eval_suite_tokens"),
    ("evaluation", "a {:.0f}% interval by bootstrap", SUITE + "intervals.py", "LEVEL"),
    ("evaluation", "With fewer than {}, there", SUITE + "intervals.py", "FEWEST"),
    ("evaluation", "within {:g} nats of 0.", SUITE + "intervals.py", "SMALLEST"),
    ("evaluation", "gain is above {:g} nats.", SUITE + "recall.py", "NOTICEABLE"),
    ("evaluation", "the last {}, {} or {} tokens", SUITE + "pointer.py", "ORDERS"),
    ("evaluation", "more than {:.0%} of their attention", SUITE + "heads.py", "COLLAPSED"),
    ("evaluation", "(default {}), `--seed`", "tools/lm_eval.py", "option('--batch_size')"),
    ("experiments", "train one cell; {} by default", GRIDS + "description.py", "processes"),
    ("experiments", "level; {} by default", GRIDS + "description.py", "alpha"),
    ("experiments", "at most {:,} cells", GRIDS + "grid.py", "MOST_CELLS"),
    ("generation", "At most {} MiB", "generate.py", "MOST_BYTES >> 20"),
    ("generation", "{:,} characters per line", "generate.py", "MOST_CHARACTERS"),
    ("generation", "tokens, {} by default", "generate.py", "option('--max-new-tokens')"),
    ("generation", "up to {} times", "tests/model/test_model_cache.py", "LENGTH // TRAINED"),
    ("gpu", "errors of {} variants of", "benchmarks/trial/measurements.py", "len(CASES)"),
    ("gpu", "at {} to {:,} tokens,", "benchmarks/attention_report.py", "min(GOALS), max(GOALS)"),
    ("gpu", "| {:g} times, {:g} times, {} times as fast", "benchmarks/train_step.py",
     "(*(least for _, _, least in GOALS['cuda']),)"),
    ("gpu", "{:.0%} of the matmul rate", "benchmarks/trial/goals.py", "MATMUL_SHARE"),
    ("gpu", "| {} µs forward, {} µs forward and", "benchmarks/host/launch_time.py",
     "(*GOALS.values(),)"),
    ("gpu", "more than {:.0f}% faster", "benchmarks/attention_tiles.py", "100 * (1 - WORTH)"),
    ("gpu", "memory at {:,} tokens", "tests/gpu/test_gpu_memory.py", "LONG"),
    ("gpu", "compute capability {}.{} or newer", FUSED, "OLDEST"),
    ("gpu", "the fused kernels need triton {},", FUSED, "SAFE_ON_HOPPER"),
    ("huggingface", "more than {} are split", EXPORT, "_SHARD.replace('GB', ' GB')"),
    ("huggingface", "`max_position_embeddings` is {:,},", EXPORT, "UNLIMITED"),
    ("huggingface", "by more than {} ({} in", EXPORT, "(*map(power, TOLERANCE.values()),)"),
    ("huggingface", "for blocks of {} queries", "megatron/hub/padded_call.py", "BLOCK"),
    ("install", "Linux with Python {}.{} or newer", "megatron/entry.py", "OLDEST"),
    ("install", "kernels need [Triton {}](", FUSED, "SAFE_ON_HOPPER"),
]  # fmt: skip
"""(page, sentence, file, the values of the sentence's braces, written with the file's names)."""


@cache
def constants(path: str) -> dict:
    """Return the constants of a Python file, of its classes too, without importing the file."""
    text = (ROOT / path).read_text()
    found = {
        "torch": torch, "TorchVersion": str, "power": power,
        "Field": lambda *value, **_: value and value[0],
        "option": lambda flag: re.search(rf'"{flag}",.*default=(\d+)', text)[1],
    }  # fmt: skip
    body = ast.parse(text).body
    for node in [*body, *(x for each in body if isinstance(each, ast.ClassDef) for x in each.body)]:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            with suppress(NameError):
                exec(ast.unparse(node), found)
    return found


def power(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-")


def says(page: str, *sentences: str) -> None:
    assert {each for each in sentences if each not in one_line(ROOT / f"docs/{page}.md")} == set()


@pytest.mark.parametrize(("page", "sentence", "file", "value"), CONSTANTS)
def test_constants_and_defaults(page, sentence, file, value):
    found = eval(value, constants(file))
    says(page, sentence.format(*(found if isinstance(found, tuple) else [found])))


def test_the_model_of_readme(monkeypatch):
    monkeypatch.chdir(ROOT)
    (cell,) = (each for each in SMALL.cells if each.name == "rotary-1235")  # without theta
    with torch.device("meta"):
        model = GPT(plan_of(cell.config(), 1024, device_type="cpu"))
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    beside = sum(n for x, n in sizes.items() if not x.startswith(("embedding.", "output.")))
    says("../README", f"small models ({beside / 1e6:.1f}M parameters without token embeddings)")


def test_the_runs_of_readme():
    found, trained = perplexities(ROOT, "code"), SMALL.about.lengths[0]
    seeds, longest = found.groupby("embedding")["seed"].nunique(), found["length"].max()
    doses = pd.read_csv(ROOT / "docs/results/recipe_dose/verdicts.csv")["dose"]
    ends = f"From {trained} to {longest:,} tokens, the perplexity"
    says("../README", f"sequences of {trained} tokens, and evaluated on up to {longest:,} tokens")
    says("../README", ends, f"each layer sees only the last {trained} tokens")
    says("../README", f"one standard deviation over {seeds.min()} to {seeds.max()} seeds")
    says("../README", f"With [{doses.max():,} steps instead of {SMALL.variables['steps']}]")
    both = ["kerple_log", "alibi"]
    for text in ("code", "prose", "latex"):
        runs = perplexities(ROOT, text).groupby("embedding")["seed"].nunique()[both]
        says("../README", *(f"LaTeX ({count} seeds each)" for count in runs))
    says("../README", f"At {2048 // trained} times the training length, the perplexity")


def test_the_layouts_and_the_first_command_of_readme():
    log = (ROOT / "tests/distributed/matrix.log").read_text()
    cells = re.findall(r"^tp(\d+)\w*-cp(\d)-pp(\d)-dp(\d)-z(\d)", log, re.M)
    most, stages = max(math.prod(map(int, each[:4])) for each in cells), [z for *_, z in cells]
    says("../README", f"on up to {most} processes", f"at most {most} processes.")
    says("../README", f"and ZeRO {min(stages)} to {max(stages)}.")
    took = re.search(
        r"The first command, installation included, took ([\d.]+) minutes .*? and ([\d.]+) on a",
        one_line(ROOT / "docs/lab/measurements.md"),
    )
    fast, slow = (round(float(minutes)) for minutes in took.groups())
    says("../README", f"the command takes {fast} to {slow} minutes on two cores")
    cuda, cpu = (row["download"] for row in rows(ROOT / "docs/install.md", "Download size"))
    says("../README", f"pip downloads {cuda}, because", f"CPU build, it downloads {cpu} (")


def test_the_embeddings():
    names = {
        "kerple_log": r"$p, a \ge {0}$", "kerple_log3": r"$p, a \ge {0}$; $r$ in [{0}, {1}]",
        "kerple_power": r"$a \ge {0}$; $p$ in [{0}, {1}]", "gaussian": r"$a, r \ge {0}$",
        "kerple_power_mul": r"$a \ge {0}$; $p$ in [{0}, {1}]", "gaussian_mul": r"$r \ge {0}$",
        "gaussian3": r"$a, r \ge {0}$; $p$ in [{0}, {1}]", "alibi_learned": r"$m \ge {0:g}$",
    }  # fmt: skip
    table = rows(ROOT / "docs/attention.md", "Embeddings")
    learned = {row["pos_emb"].split("`")[0]: list(row.values())[-1] for row in table}
    for name, text in names.items():
        (low,) = {each.low for each in load(name).parameters}
        highs = {each.high for each in load(name).parameters} - {math.inf}
        assert learned[name] == text.format(low, *(f"{high:g}" for high in highs)), name
    fire, smallest = load("fire"), load("kerple_power_original").parameters[0].low
    bam, sink, log_n = (load(x).initial_theta(2).unique() for x in ("bam", "sink", "log_n"))
    says("attention", f"{fire.width} numbers $v$", f"`fire` (default {fire.length})")
    says("attention", rf"$-\max(m_h, {smallest}) \, d$", f"$m$; initially {bam.item():g} |")
    says("attention", f"| the logit, initially {sink.item():g} |")
    start = log_n.item() * math.log(load("log_n").length)
    says("attention", f"initially {start:g} / log(`length`)")
    theta, exact = load("kerple_log").parameters, 2 / torch.finfo(torch.bfloat16).eps
    says("../ARCHITECTURE", f"with n = {len(theta)} for `kerple_log`")
    says("../ARCHITECTURE", f"(a ≥ {theta[1].low}, ...)", f"distances above {exact:.0f}.")


def test_the_exit_codes(monkeypatch, capsys):
    @entry.reports
    def fails(error: Exception) -> int:
        raise error

    with pytest.raises(SystemExit) as refused:
        load_or_exit(Namespace(hostfile="hosts"))
    both = f"exit code is {fails(OSError())}, or {refused.value.code} if the mistake is in the"
    says("../ARCHITECTURE", both)
    says("cluster", f"ends with exit code {fails(RehearsalError())}. The error")
    codes, cell, given = [], SMALL.cells[0], str(CONFIGS / "paper/length_tasks.yml")
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    for state, failed, left in (("stale", [], []), ("new", [cell], []), ("new", [], [cell])):
        ended = SimpleNamespace(failed=failed, left=left, signals=[], receive=None, run=list)
        for name, value in (
            ("Runner", ended), ("state_of", (state, "")),
            ("write_index", pd.DataFrame({"state": [state]})),
        ):  # fmt: skip
            monkeypatch.setattr(sweep, name, lambda *_, value=value: value)
        codes.append(sweep.main([given, "--cell", "0"]))
    says("experiments", f"stale cells give exit code {codes[0]}.", f"is then {codes[1]}.")
    says("experiments", f"runs in another sweep, and ends with exit code {codes[2]}.")


def test_the_suite(monkeypatch):
    text = Sample(np.arange(2050)[None] % 300, np.zeros(1), 128, (128, 2048), 65536)
    spans = ", ".join(f"{a}-{b - 1}" if b - 1 > a else f"{a}" for a, b in text.bins(1)[:3])
    says("evaluation", f"predicted from {spans}, ... earlier")
    says("evaluation", f"the loss of the last {text.tail} tokens if the model")
    says("evaluation", f"how much the loss of the last {text.tail} tokens changes")
    monkeypatch.setattr(recall, "by_depth", lambda *given: given[-1])
    puzzle = recall.copying(None, text)(np.random.default_rng(0))
    says("evaluation", f"a text contains {sum(map(len, puzzle.statements))} random tokens")
    lengths = json.loads(suite_lengths(load_config([CONFIGS / "quickstart.yml"]))[0][13:])
    *times, most = (n // lengths[0] for n in lengths)
    told = f"the default is {', '.join(map(str, times))} and {most} times"
    planted = pd.read_csv(ROOT / "docs/results/suite_planted.csv")["right"].value_counts()
    count, missed = planted.sum(), planted["missed"]
    assert "no" not in planted
    says("evaluation", told, f"None of the suite's {count} answers is false, but {missed} ")
    verdict = json.loads((ROOT / "docs/quickstart/suite/report.json").read_text())["verdict"][0]
    says("evaluation", f'such as "{verdict.partition(":")[0]}"')


def test_the_accuracy_and_the_speed():
    cached = (ROOT / "tests/model/test_model_cache.py").read_text()
    imported = (ROOT / "tests/hub/test_imported_logits.py").read_text()
    (error,) = {*re.findall(r"rtol=0, atol=([\d.e-]+)\)", cached)}
    says("generation", f"in float64, to {error}, for every")
    (error,) = re.findall(r"\(logits - wanted\)\.abs\(\)\.max\(\) <= ([\d.e-]+)", imported)
    says("huggingface", f"transformers' logits by at most {error}, also")
    speed = (ROOT / "benchmarks/results/generation_speed.md").read_text()
    layers, width = re.search(r"(\d+) layers, width (\d+)", speed).groups()
    rate, ratio = re.search(r"\| kerple_log \|.*\| ([\d.]+) \| ([\d.]+) \|", speed).groups()
    told = f"generates {rate} tokens/s in one thread, {ratio} times as fast"
    says("generation", f"A model of {layers} layers of width {width} {told}")


def test_the_bytes_of_a_special_token():
    tokenizer, table = ByteLevelTokenizer(), np.zeros(300, int)
    tokenizer.count_bytes(table)
    says("data", f"A special token counts as {table[tokenizer.eod]} bytes.")


def test_the_trial_of_a_gpu():
    text = (ROOT / "benchmarks/trial/measurements.py").read_text()
    name, keys = re.search(r'"(decoding, (\d+) keys)"', text).groups()
    ((_, goal, *_),) = KINDS["decoding"](name, {"us": 0.0})
    says("gpu", f"one query and {int(keys):,} keys |", f"backward; {goal.removeprefix('<= ')} µs |")
    small = round(PYTHIA["small", 128][0] / 1e6)
    says("gpu", f"training step of the {small}M model")


def test_the_versions():
    pinned = pins(ROOT / "requirements-dev.txt", included=True)
    oldest = {x: bounds(each)[">="] for of in ranges(ROOT).values() for x, each in of.items()}
    for row in rows(ROOT / "docs/install.md", "Versions"):
        wanted = oldest if row["packages"] == "oldest versions" else pinned
        for name in ("torch", "triton", "numpy"):
            assert row[name].removesuffix(" (CUDA build)") == str(wanted[name])
        if wanted is oldest or row["what was run (2026-11-23)"] == "all tests":
            assert row["Python"] == "{}.{}".format(*entry.OLDEST)
    torch, triton = (f"{oldest[x].major}.{oldest[x].minor}" for x in ("torch", "triton"))
    newest = {name: version.rpartition(".")[0] for name, version in pinned.items()}
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.M)[1]
    says("gpu", f"torch {torch} or newer, and triton {triton} or newer", f"by triton {triton} read")
    says("cluster", f"torchrun's store (torch {newest['torch']}) may")
    says("install", f"interpreter of Triton {triton} needs numpy below {newest['numpy']}.")
    says("install", f"The image contains CUDA {cuda} (", f"PyPI: the build for CUDA {cuda},")
    script = (ROOT / ".ci/transformers4").read_text()
    version = re.search(r"transformers==(\d+\.\d+)", script)[1]
    says("huggingface", f"work with transformers {version} (`.ci/transformers4`)")
