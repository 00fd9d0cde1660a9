"""Test that the figures of the training step on a CPU are those of its three reports."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.pages.figures.held import says
from tests.pages.figures.test_figures_of_performance import FOLDER, goals_on, limits, row, stands

PROJECT, LOOP = "project", "project, plain loop"


def variants(folder: str) -> dict[str, Any]:
    found = json.loads((FOLDER / folder / "train_step.json").read_text())
    return {row["variant"]: row for row in found["rows"]}


def report_of(folder: str) -> str:
    return (FOLDER / folder / "train_step.md").read_text()


def test_the_training_step():
    first, other = map(variants, ("train_step", "train_step_amd_zen4"))
    speed = {name: each["tokens_per_second"] for name, each in first.items()}
    of_plain, of_published, of_compiled = goals_on("cpu")
    plain = speed["project"] / speed["plain"]
    rates = " and ".join(f"{speed[x] / 1000:.1f}k" for x in ("project", "plain"))
    found = row("On a CPU", "training step of the quickstart's shape")
    assert found["stands"] == f"{plain:.2f} ({rates})" and found["goal"] == f"≥ {of_plain}"
    compiled = row("On a CPU", "the same, both compiled")
    ratio = speed["project, compiled"] / speed["plain, compiled"]
    assert compiled["stands"] == f"{ratio:.2f}" and compiled["goal"] == f"≥ {of_compiled}"
    published = row("On a CPU", "the same / published operations")
    ratio = round(speed["project"] / speed["published"], 2)
    now, *_, before, _ = limits(published["goal"])
    assert published["stands"] == f"{ratio:.2f}" and now == of_published
    (earlier,) = re.findall(r"project / published, .*? \| ([\d.]+) \|", report_of("train_step"))
    assert before == float(earlier)
    said = f"by {now - ratio:.2f}, and the earlier goal by {before - ratio:.2f}."
    assert said in published["evidence"]
    shown = stands("On a CPU", "a step's share of the rate")
    assert f"{first['project']['share_of_matmul']:.0%} at width 128" in shown
    speed = {name: each["tokens_per_second"] for name, each in other.items()}
    than = [speed[name] for name in ("plain", "published")]
    ratios, loop = ([speed[x] / y for y in than] for x in ("project", "project, plain loop"))
    products = [other[x]["parts"]["products"] for x in ("project", "plain", "published")]
    family, model = re.findall(r"family (\d+), model (\d+)", report_of("train_step_amd_zen4"))[0]
    says(
        "lab/performance",
        f"On family {family}, model {model}, oneDNN",
        f"has {ratios[0]:.2f} of the plain loop's tokens per second and {ratios[1]:.2f} of the",
        f"without DeepSpeed has {loop[0]:.2f} and {loop[1]:.2f}, which",
        f"has {speed['project, compiled'] / speed['plain, compiled']:.2f}. The products take"
        f" {min(products):.0%} to {max(products):.0%} of each",
        f"the whole step is {plain:.2f} times as fast as the plain loop",
    )


def test_the_training_step_on_intel():
    rows = variants("train_step_intel")
    speed = {name: each["tokens_per_second"] for name, each in rows.items()}
    than = [speed[name] for name in ("plain", "published")]
    ratios, loop = ([round(speed[x] / y, 2) for y in than] for x in (PROJECT, LOOP))
    found = row("On a CPU", "the same two on Intel")
    assert found["stands"] == "{:.2f}; {:.2f}".format(*ratios)
    missed = [goal - ratio for goal, ratio in zip(limits(found["goal"]), ratios, strict=True)]
    assert found["evidence"].endswith("missed by {:.2f} and {:.2f}".format(*missed))
    family, model = re.findall(r"family (\d+), model (\d+)", report_of("train_step_intel"))[0]
    attention = [rows[name]["parts"]["attention"] for name in (PROJECT, "plain")]
    says(
        "lab/performance",
        f"(family {family}, model {model}), the step has {ratios[0]:.2f} of the plain loop's",
        f"and {ratios[1]:.2f} of the published operations' ([table](../../benchmarks/results/train_"
        "step_intel",
        f"Without DeepSpeed, the project's model has {loop[0]:.2f} and {loop[1]:.2f}.",
        "Attention takes {:.0%} of the project's step and {:.0%} of the plain".format(*attention),
    )
    assert all("30000" in rows[name]["waiting"] for name in (PROJECT, LOOP))
