"""Test that the figures of the guides from Layouts to Your model are those of the code and configs.

`test_figures_of_constants.py` has the sentences with a constant or a default, and
`test_figures_of_measurements.py` those with results.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pandas as pd
import pytest
from scipy import stats

from megatron.config import ConfigError, load_config
from megatron.config.mlp_width import inner_width
from megatron.data.tasks.registry import TASKS
from megatron.engine.build import plan_of
from megatron.engine.training.speed import flops_per_token
from tests.helpers.paths import CONFIGS, ROOT
from tests.model.published_sizes import parameters
from tests.pages.figures.held import (
    QUICKSTART,
    constant,
    one_line,
    rows,
    says,
    smallest,
    word,
    yml,
)

OWN = load_config([CONFIGS / "recipes" / "own_160M.yml"])


def test_the_options_of_the_length_tasks():
    lines = (ROOT / "docs/length_tasks.md").read_text().splitlines()
    for name, task in TASKS.items():
        of = {each.name: str(each.default).lower() for each in dataclasses.fields(task)}
        least, most = of.pop("min_length"), of.pop("max_length")
        [line] = (line for line in lines if line.startswith(f"| `builtin:{name}` |"))
        assert line.endswith("| " + ", ".join(f"`{key}: {of[key]}`" for key in of) + " |")
        says("length_tasks", f"in addition to `min_length: {least}`, `max_length: {most}`")
    interval = inspect.signature(stats.binomtest(1, 2).proportion_ci).parameters
    says("length_tasks", f"with its {interval['confidence_level'].default:.0%} interval (Wilson)")
    found = pd.read_csv(ROOT / "docs/length_tasks/crosses.csv")
    sums = sum("+" in name for name in found["embedding"].unique())
    count, tasks = found["embedding"].nunique() - sums, found["task"].nunique()
    counts = f"{word(count)} embeddings and {word(sums)} sums of embeddings on {word(tasks)} tasks"
    says("length_tasks", f"compares {counts}, most with one seed: too")


def test_operations_of_a_token():
    shape = plan_of(QUICKSTART, 1024, device_type="cpu", eod=0).shape
    width, larger = shape.block.hidden_size, dataclasses.replace(shape, vocab_size=1025)
    weight = (flops_per_token(larger, 0) - flops_per_token(shape, 0)) / width
    key = (flops_per_token(shape, 1) - flops_per_token(shape, 0)) / width / shape.num_layers
    says("logs", f"counts {weight:g}, and attention counts {key:g} × layers × width × keys")


def test_stages_of_zero():
    with pytest.raises(ConfigError) as refused:
        smallest("zero_optimization.stage=9")
    least, most = re.search(r"from (\d) to (\d)", str(refused.value)).groups()
    says("training", f"sets the ZeRO stage, {least} to {most}.")


def test_the_layouts_of_muon():
    def refusal(given: str) -> str:
        try:
            smallest("optimizer.type=muon", given, processes=2 if "parallel" in given else 1)
        except ConfigError as error:
            return str(error)
        return ""

    refusals = [refusal(f"zero_optimization.stage={stage}") for stage in range(4)]
    first, second = (stage for stage, text in enumerate(refusals) if not text)
    other, last = (stage for stage, text in enumerate(refusals) if "needs whole matrices" in text)
    says("training", f"Muon works with ZeRO {first} and {second}, and with pipelines. Tensor "
         f"parallelism, ZeRO-{other} and ZeRO-{last} are refused.")  # fmt: skip
    assert not refusal("pipe_parallel_size=2")
    assert "muon needs whole matrices" in refusal("model_parallel_size=2")


def test_the_examples_beside_their_sentences():
    """The numbers of the sentences are those of the code span before them."""
    for page in ("training", "troubleshooting"):
        (processes,) = re.findall(r"--gpus (\d+)` checks", one_line(ROOT / "docs" / f"{page}.md"))
        says(page, f"configuration for {processes} processes.")
    (given,) = re.findall(r"`curriculum: (.*?)` trains", (ROOT / "docs/training.md").read_text())
    (_, short), (after, long) = json.loads(given)
    config = smallest(f"curriculum={given}", f"seq_length={long}")
    assert [config.length_of(step) for step in (1, after, after + 1)] == [short, short, long]
    says("training", f"trains with sequences of {short} tokens at first, and of {long} tokens after"
         f" {after:,} steps.")  # fmt: skip


def test_inner_widths():
    keys = yml("recipes/llama_7B.yml")
    llama, mistral = keys["intermediate_size"], yml("llama/mistral-7B.yml")["intermediate_size"]
    multiple, kind = keys["mlp_multiple_of"], keys["activation"]
    width, wide = inner_width(kind, llama, multiple), inner_width("swiglu", mistral, 1)
    given = f"`intermediate_size: {llama}` and `mlp_multiple_of: {multiple}` with `{kind}` give"
    says("model_keys", f"{given} LLaMA's inner width of {width:,}.", f"For Mistral's {wide:,}")
    says("model_keys", f"write `intermediate_size: {mistral}`. gpt-neox's own file sets {wide}, "
         f"which gives {inner_width('swiglu', wide, 1):,}.")  # fmt: skip
    plain, geglu = (smallest(f"activation={name}").model for name in ("gelu", "geglu"))
    usual, gated = (each.intermediate_size // each.hidden_size for each in (plain, geglu))
    says("model_keys", f"The default is {usual} × `hidden_size` (for `geglu` {gated} ×)")


def test_defaults_of_the_published_code():
    table = rows(ROOT / "configs/README.md", "Defaults where the two code bases differ")
    dropout, decay, clipping, rate, stage = (
        next(row["published KERPLE code"] for row in table if row["key"].startswith(key))
        for key in ("attention_dropout", "weight_decay", "gradient_clipping", "optimizer.params.lr",
                    "zero_optimization")
    )  # fmt: skip
    theirs = f"{dropout}, {decay}, {clipping}, {stage.removeprefix('stage ')}, {rate}"
    ours = f"{smallest().model.hidden_dropout:g}, {smallest().optimizer.weight_decay}"
    clipping, stage = smallest().optimizer.gradient_clipping, smallest().parallel.zero_stage
    ours += f", {clipping}, {stage}, no default."
    says("moving_from_kerple", f"learning rate | {theirs} | {ours}")


def test_your_model():
    page = (ROOT / "docs" / "your_model.md").read_text()
    vocabulary = int(re.findall(r"train-tokenizer texts --size (\d+)", page)[0])
    size, tokens = parameters(OWN, vocabulary)[0], OWN.model.seq_length
    tokens *= OWN.batch.train_batch_size * OWN.training.train_iters
    each = f"{tokens / size:.0f} for each parameter"
    says("your_model", f"The run reads {tokens / 1e9:.1f} billion tokens, {each}.")
    says("your_model", f"a GPT of {size / 1e6:.0f} million parameters")
    first, *_, last = (n // OWN.model.seq_length for n in OWN.evaluation.eval_lengths)
    says("your_model", f"perplexity at {first} to {last} times the training length")
    smaller, small_model = (
        constant("tests/pages/test_your_model.py", x) for x in ("SMALLER", "SMALL")
    )
    large, small = (
        {
            name.replace("=", " ").split()[0]: new.replace("=", " ").split()[-1]
            for name, new in pairs
        }
        for pairs in ([(name, name) for name in smaller], smaller.items())
    )
    layers = f"{word(small_model['num_layers'])} layers of width {small_model['hidden_size']}"
    vocabulary = f"{int(large['--size']):,} tokens"
    says("your_model", f"with a vocabulary of {vocabulary}")
    says("your_model", f"| {vocabulary} of the tokenizer | {small['--size']} |")
    workers, new = ((each["--workers"], each["--max-new-tokens"]) for each in (large, small))
    says("your_model", f"| {workers[0]} workers, {workers[1]} new tokens | {', '.join(new)} |")
    says("your_model", f"| {large['--gpus']} GPUs | {small['--gpus']} processes on a CPU")
    says("your_model", f"{layers}, {small_model['seq_length']} tokens, a few")


def test_the_usual_changes():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## The usual changes\n")[1]
    changes = re.findall(r"^\*\*[^*]+\.\*\*", text.split("\n## ")[0], re.M)
    assert f"For {word(len(changes))} usual changes" in text
