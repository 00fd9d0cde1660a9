"""Test that the figures of README, Architecture and half of the guides are those of the code.

`test_figures_of_constants.py` has the sentences with a constant or a default, and
`test_figures_of_measurements.py` those with results.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pandas as pd
import torch

from benchmarks.trial.goals import KINDS
from evaluate import suite_lengths
from megatron import entry
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Sample
from megatron.positional import load
from tests.checks.versions import bounds, pins, ranges
from tests.distributed.matrix import STEPS
from tests.helpers.paths import ROOT
from tests.model.published_sizes import PYTHIA, parameters
from tests.pages.figures.held import (
    QUICKSTART,
    RESULTS,
    and_list,
    first_command,
    grid,
    matrix_log,
    rows,
    says,
    word,
)


def test_the_model_of_readme(monkeypatch):
    monkeypatch.chdir(ROOT)
    cell = next(each for each in grid("stand_in").cells if each.axes["embedding"] == "rotary")
    _, beside = parameters(cell.config(), 1024)  # rotary embeddings have no parameters
    says("../README", f"small models ({beside / 1e6:.1f}M parameters without token embeddings)")


def test_the_layouts():
    cells, _ = matrix_log()
    most, stages = max(each.processes for each in cells), [each.zero_stage for each in cells]
    says("../README", f"on up to {most} processes", f"at most {most} processes.")
    says("../README", f"and ZeRO {min(stages)} to {max(stages)}.")
    plain = [each for each in cells if not each.several]
    told = f"trained {len(plain)} combinations of a layout, a model and a precision"
    most = max(each.processes for each in plain)
    says("layouts", f"{told} for {word(STEPS)} steps, on up to {most} processes.")
    change = (ROOT / "tests/distributed/test_change_layout.py").read_text()
    tolerance = re.search(r'tolerance = \S+ if "bf16" in old else (\S+)', change)[1]
    says("layouts", f"in the old layout, to {tolerance}.")


def test_the_first_command_of_readme():
    fast, slow = (round(float(minutes)) for minutes in first_command())
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
    says("attention", rf"$-\max(m_h, {smallest}) \, d$", f"$m$; initially {bam.item():g} (the")
    says("attention", f"| the logit, initially {sink.item():g} |")
    start = log_n.item() * math.log(load("log_n").length)
    says("attention", f"initially {start:g} / log(`length`)")
    theta, exact = load("kerple_log").parameters, 2 / torch.finfo(torch.bfloat16).eps
    says("../ARCHITECTURE", f"with n = {len(theta)} for `kerple_log`")
    says("../ARCHITECTURE", f"(a ≥ {theta[1].low}, ...)", f"distances above {exact:.0f}.")


def test_the_suite(monkeypatch):
    text = Sample(np.arange(2050)[None] % 300, np.zeros(1), 128, (128, 2048), 65536)
    spans = ", ".join(f"{a}-{b - 1}" if b - 1 > a else f"{a}" for a, b in text.bins(1)[:3])
    says("evaluation", f"predicted from {spans}, ... earlier")
    says("evaluation", f"the loss of the last {text.tail} tokens if the model")
    says("evaluation", f"how much the loss of the last {text.tail} tokens changes")
    monkeypatch.setattr(recall, "by_depth", lambda *given: given[-1])
    puzzle = recall.copying(None, text)(np.random.default_rng(0))
    says("evaluation", f"a text contains {sum(map(len, puzzle.statements))} random tokens")
    lengths = json.loads(suite_lengths(QUICKSTART)[0][13:])
    told = f"the default is {and_list(n // lengths[0] for n in lengths)} times"
    planted = pd.read_csv(RESULTS / "suite_planted.csv")["right"].value_counts()
    count, missed = planted.sum(), planted["missed"]
    assert "no" not in planted
    more = pd.read_csv(RESULTS / "suite_planted_more_text.csv")["right"]
    assert (more == "yes").all()
    told_of_planted = f"Of {count} answers, none is false, but {missed} report too little; with"
    says("evaluation", told, f"{told_of_planted} more text, all {len(more)} are right")
    verdict = json.loads((ROOT / "docs/quickstart/suite/report.json").read_text())["verdict"][0]
    says("evaluation", f'such as "{verdict.partition(":")[0]}"')


def test_the_accuracy_and_the_speed():
    cached = (ROOT / "tests/model/test_model_cache.py").read_text()
    imported = (ROOT / "tests/hub/test_imported_logits.py").read_text()
    (error,) = {*re.findall(r"rtol=0, atol=([\d.e-]+)\)", cached)}
    says("generation", f"in float64, to {error}, for every")
    (times,) = re.findall(r"^LENGTH = (\d+) \* TRAINED$", cached, re.M)
    says("generation", f"up to {times} times")
    (error,) = re.findall(r"\(logits - wanted\)\.abs\(\)\.max\(\) <= ([\d.e-]+)", imported)
    says("huggingface", f"transformers' logits by at most {error}, also")
    speed = (ROOT / "benchmarks/results/generation_speed.md").read_text()
    layers, width = re.search(r"(\d+) layers, width (\d+)", speed).groups()
    found = re.findall(r"\| (rotary|kerple_log) \|.*\| ([\d.]+) \| ([\d.]+) \|", speed)
    (rotary, slow, less), (log, fast, more) = found
    told = f"generate {slow} tokens/s with `{rotary}` and {fast} with `{log}` in one thread:"
    told += f" {less} and {more} times as many as transformers' GPTNeoX"
    says("generation", f"with AVX-512, {layers} layers of width {width} {told}")


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
        *_, tested = row.values()
        for name in ("torch", "triton", "numpy"):
            assert row[name].removesuffix(" (CUDA build)") == str(wanted[name])
        if wanted is oldest or tested == "all tests":
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
