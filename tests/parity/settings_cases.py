"""Check the parity case `config`: learning rates, and settings that the published code derives.

The case contains the names of published YAML files, but not the files. `--configs DIR` names the
folder that contains the files. This folder is `kerple_configs` in a checkout of the published code,
after a script of the published code has generated the files of the experiments. Without the files,
the configuration is assembled from the values of the derived settings. A setting is left out if it
is not a config key, or if it can be computed from other settings (such as `train_batch_size`).

The check fails if a key is unknown, or if this project derives another value for a setting.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError, load_config
from megatron.config.choices import positional_name
from megatron.config.neox.known_keys import FIELD_OF, KNOWN_KEYS
from megatron.config.neox.no_effect import NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.engine.job_data import samples_of_run
from megatron.engine.training.schedule import schedule_of
from tests.parity.result import Result

RATES = 1e-12
# Maps settings of the published code that are not config keys to the fields of our config.
RENAMED = {
    "optimizer_type": "type",
    "lr": "lr",
    "zero_stage": "zero_stage",
    "clip_grad": "gradient_clipping",
    "gas": "gradient_accumulation_steps",
    "batch_size": "train_micro_batch_size_per_gpu",
}
PRECISIONS = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}
FOLLOWS = {"train_batch_size", "gradient_accumulation_steps", "precision", "attention_config"}
# The smallest valid config, to which the keys of a learning-rate schedule are added.
BARE = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 8,
    "train_micro_batch_size_per_gpu": 1,
}


def check_rates(folder: Path, name: str) -> Iterator[Result]:
    """Compare learning rates with lr_schedule.json, and yield one result for each schedule."""
    for key, case in json.loads((folder / "lr_schedule.json").read_text()).items():
        result = Result(f"{name} {key}")
        state = case["state_dict"]
        keys = BARE | {
            "optimizer": {"type": "Adam", "params": {"lr": state["start_lr"]}},
            "lr_decay_iters": state["end_iter"],
            "warmup": state["warmup_iter"] / state["end_iter"],
            "lr_decay_style": state["decay_style"],
            "min_lr": state["min_lr"],
            "train_iters": state["end_iter"],
        }
        # Some schedules have overrides, which must have the same effect in our config.
        changes = [
            f"{changed}={json.dumps(value)}"
            for changed, value in case.get("overrides", {}).items()
            if changed.replace("-", "_") in FIELD_OF and isinstance(value, (int, float, str))
        ]
        schedule = schedule_of(_load(keys, changes))
        for number, rate in case["lr_at_num_iters"].items():
            result.compare("rates", schedule(int(number)), rate, RATES, scale=max(rate, 1e-30))
        first = case.get("lr_after_construction", schedule(0))
        result.compare("rates", schedule(0), first, RATES, scale=max(first, 1e-30))
        yield result


def check_derived(folder: Path, name: str, configs: Path | None) -> Iterator[Result]:
    """Compare derived settings with derived_args.json, and yield one result for each entry.

    An entry holds the settings that the published code derived from one list of config files, for
    one number of processes.

    Args:
        folder: The folder of derived_args.json.
        name: The name of this comparison in its results.
        configs: The folder with the published config files. If it is None, the files are read from
            `folder`.
    """
    cases = json.loads((folder / "derived_args.json").read_text())
    for key, case in cases.get("derived", cases).items():
        result = Result(f"{name} {key}")
        derived = case["derived"]
        try:
            config = _config_of(key, case, configs or folder)
        except ConfigError as error:
            result.faults.append(str(error))
            yield result
            continue
        ours = {field: value for _, section in config.sections() for field, value in section}
        compared = 0
        for attribute, value in derived.items():
            field = RENAMED.get(attribute) or FIELD_OF.get(attribute)
            if field in ours and not isinstance(value, (dict, list)):
                result.expect(attribute, ours[field], _translated(attribute, value))
                compared += 1
        if "data_num_samples" in derived:
            result.expect("data_num_samples", samples_of_run(config), derived["data_num_samples"])
        result.add(f"of {compared} values, differing", len(result.faults), 0)
        yield result


def _config_of(key: str, case: dict[str, Any], folder: Path) -> Config:
    """Load the configuration of one entry of derived_args.json, for the entry's process count.

    The entry's config files are read from `folder`. If the files are missing, the configuration is
    assembled from the entry's derived settings.
    """
    derived = case["derived"]
    named = re.search(r"gpus(\d+)", key)
    per_process = derived["train_micro_batch_size_per_gpu"] * derived["gradient_accumulation_steps"]
    processes = int(named[1]) if named else derived["train_batch_size"] // per_process
    files = [folder / file for file in case.get("files", [])]
    if files and all(file.is_file() for file in files):
        # This key must be given, because the published default differs from ours.
        silent = [f"output_layer_parallelism={derived['output_layer_parallelism']}"]
        return load_config(files, silent, world_size=processes)
    keys = {
        name: value
        for name, value in derived.items()
        if name in KNOWN_KEYS - FOLLOWS - set(NO_EFFECT) - set(REFUSED) and value is not None
    }
    passed = derived.get("deepspeed_config_passed", {})
    lr = {"params": {"lr": derived["lr"]}}
    keys["optimizer"] = passed.get("optimizer", {"type": derived["optimizer_type"], **lr})
    keys["zero_optimization"] = passed.get("zero_optimization", {"stage": derived["zero_stage"]})
    if "fp16" in passed:
        keys["fp16"] = passed["fp16"]
    else:
        keys["precision"] = derived["precision"]
    return _load(keys, processes=processes)


def _load(keys: dict[str, Any], overrides: Sequence[str] = (), *, processes: int = 1) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(keys, file)
        file.flush()
        return load_config([file.name], overrides, world_size=processes)


def _translated(attribute: str, value: Any) -> Any:
    """Convert a published value to the name that our config uses, such as bfloat16 to bf16."""
    if attribute == "pos_emb":
        return positional_name(value)
    if attribute == "precision":
        return PRECISIONS.get(value, value)
    return value.lower() if attribute == "optimizer_type" else value
