"""Write the README.md of an export, which the Hugging Face hub shows as the model card."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.open_run import OpenRun
from megatron.files import parse_json, read_small
from megatron.run_folder import RunFolder
from megatron.templates import render

_MOST_BYTES = 1 << 24
_TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def model_card(run: OpenRun, *, own_class: bool, licence: str) -> str:
    """Return the text of the model card, the file README.md.

    Args:
        run: The run whose model is exported.
        own_class: Whether the export contains a Python file with the model's class.
        licence: The name of the licence on the Hugging Face hub, such as `apache-2.0`.
    """
    saved: Any = run.saved  # None for a model that was never saved
    results, verdict = _results(saved) if saved else ([], [])
    return render(
        _TEMPLATE,
        {"formula": _formula, "number": "{:,}".format},
        terms={term.name: term for term in run.model.pos.terms},
        count=sum(weight.numel() for weight in run.model.parameters()), shape=run.model.shape,
        trained=run.config.model.seq_length, recipe=_recipe(run), results=results, verdict=verdict,
        own_class=own_class, longest=run.model.longest_text, licence=licence,
    )  # fmt: skip


def _formula(term: Any) -> str:
    """Return the formula of a positional embedding, which its module's docstring contains."""
    text = inspect.getdoc(inspect.getmodule(type(term))) or term.name
    return text.removeprefix("Define ").strip()


def _recipe(run: OpenRun) -> dict[str, Any]:
    """Return a dict of the run's settings, such as data and steps. It is {} for imported models."""
    # `run.config` has the batch and the optimizer of inference, and so have imported checkpoints.
    saved: Any = run.saved  # None for a model that was never saved
    if not saved or saved.kind != "ours":
        return {}
    flat = saved.record.config
    keys = {name: flat[name] for name in ("data_path", "train_data_paths") if flat.get(name)}
    steps = f"{saved.step:,} of {flat['train_iters']:,}"
    keys["steps"] = f"{steps}, each of {flat['train_batch_size']} texts"
    names = ("optimizer", "lr_decay_style", "weight_decay", "precision", "seed")
    return keys | {name: flat.get(name) for name in names}


def _results(saved: Saved) -> tuple[list[list[str]], list[str]]:
    """Return (rows of the run's `extrapolation.csv`, verdict of the evaluation suite).

    Each is [] if its file is missing, or measured another step than that of `saved`.
    """
    run = RunFolder(Path(saved.path).parent)
    rows, verdict, report = [], [], run.suite / "report.json"
    if run.extrapolation.is_file():
        lines = read_small(run.extrapolation, _MOST_BYTES).decode().splitlines()
        table = [line.split(",") for line in lines]
        steps = {dict(zip(table[0], row, strict=False)).get("step") for row in table[1:]}
        rows = table if steps <= {str(saved.step), None} else []  # None: the table has no steps
    if report.is_file():
        content = parse_json(read_small(report, _MOST_BYTES))
        if content.get("facts", {}).get("step", saved.step) == saved.step:
            verdict = content.get("verdict", [])
    return rows, verdict
