"""Write README.md of an export: a model card, as the Hugging Face hub shows it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from megatron.engine.checkpoint.saved_checkpoints import Kind
from megatron.engine.open_run import OpenRun
from megatron.files import parse_json, read_small
from megatron.run_folder import RunFolder

_MOST_BYTES = 1 << 24
_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(DIR{trust})
tokenizer = AutoTokenizer.from_pretrained(DIR)
texts = tokenizer(["Once upon a time"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**texts, max_new_tokens=100)))
```"""


def model_card(run: OpenRun, *, own_class: bool, longest: int | None, licence: str) -> str:
    """Return the text of README.md.

    Args:
        run: The run whose model is exported.
        own_class: Whether the export contains a Python file with the model's class.
        longest: The maximum number of tokens in a text, or None if there is no limit.
        licence: The name of the licence on the Hugging Face hub, such as `apache-2.0`.
    """
    shape, config = run.model.shape, run.config
    count = sum(weight.numel() for weight in run.model.parameters())
    limit = "any length" if longest is None else f"at most {longest:,} tokens"
    trust = ", trust_remote_code=True" if own_class else ""
    terms = {term.name: term for term in run.model.pos.terms}
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: {licence}\n---",
        f"# A GPT with {' and '.join(terms)}",
        f"{count:,} parameters: {shape.num_layers} layers, width {shape.block.hidden_size}, "
        f"{shape.block.num_heads} heads, {shape.vocab_size:,} tokens in the vocabulary. Trained by "
        "KERPLE-NeoX.",
        "## Use",
        _LOAD.format(trust=trust),
        *(["This runs `modeling_kerple.py` of the folder. Read it first."] if own_class else []),
        "## Positional embedding",
        *(f"**{name}**: {_formula(term)}" for name, term in terms.items()),
        "## Lengths",
        f"Trained with texts of {config.model.seq_length:,} tokens. It reads {limit}.",
        "## Data and recipe",
        "\n".join(f"- {name}: {value}" for name, value in _recipe(run).items()),
        *_results(run),
    ]
    return "\n\n".join(parts) + "\n"


def _formula(term: Any) -> str:
    """Return the module docstring of a positional embedding."""
    text = inspect.getdoc(inspect.getmodule(type(term))) or term.name
    return text.removeprefix("Define ").strip()


def _recipe(run: OpenRun) -> dict[str, Any]:
    """Return a dict of the model's training settings, such as data, steps and optimizer."""
    # `run.config` has the batch and the optimizer of inference, so both come from the checkpoint.
    saved: Any = run.saved  # None for a model that was never saved
    recorded = saved.record.config if saved and saved.kind is not Kind.PUBLISHED else {}
    flat, keys = recorded or run.config.to_flat_dict(), {}
    keys |= {name: flat[name] for name in ("data_path", "train_data_paths") if flat.get(name)}
    if recorded:
        keys["steps"] = f"{flat['train_iters']:,} of {flat['train_batch_size']} texts"
        keys["optimizer"] = flat.get("optimizer")
    names = ("lr_decay_style", "weight_decay", "precision", "seed")
    return keys | {name: flat.get(name) for name in names}


def _results(run: OpenRun) -> list[str]:
    """Return Markdown texts with the run's results of `evaluate.py`, if there are any."""
    saved: Any = run.saved  # None for a model that was never saved
    if saved is None:
        return []
    folder, parts = RunFolder(Path(saved.path).parent), []
    if folder.extrapolation.is_file():
        rows = read_small(folder.extrapolation, _MOST_BYTES).decode().splitlines()
        table = [f"| {' | '.join(row.split(','))} |" for row in rows]
        table.insert(1, "|" + "---|" * len(rows[0].split(",")))
        parts += ["## Perplexity by length", "\n".join(table)]
    report = folder.suite / "report.json"
    if report.is_file():
        verdict: Any = parse_json(read_small(report, _MOST_BYTES)).get("verdict", [])
        parts += ["## Use of context", "\n".join(f"- {line}" for line in verdict)]
    return parts
