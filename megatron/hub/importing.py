"""Import a model folder of transformers as a new run folder, which our commands can load.

RUN/config.yml              the config keys of the model, and the keys that every run needs
RUN/tokenizer.json          copied from the folder, or converted from the SentencePiece model
RUN/tokenizer.model         the SentencePiece model, copied from the folder if it exists
RUN/tokenizer_config.json   copied from the folder if it exists
RUN/chat_template.jinja     copied from the folder if it exists
RUN/global_step0/           a checkpoint without the state of an optimizer
RUN/latest                  the name of the checkpoint's folder
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError, load_config
from megatron.config.flat import to_yaml
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import positional_of, tokenizer_of
from megatron.engine.checkpoint.publish import new_folder, write_import
from megatron.engine.errors import HubError
from megatron.engine.model_shape import identity_of, shape_of
from megatron.hub.classes import class_of, shape_values
from megatron.hub.config_keys import (
    OWN_CLASS,
    OWN_KEYS,
    fileless_tokenizer,
    keys_of,
    keys_of_export,
)
from megatron.hub.llama_tokenizer import write_tokenizer_json
from megatron.hub.read import read_in, read_json, read_weights
from megatron.hub.tokenizer import TEMPLATE
from megatron.hub.weights import Parts, layout_of
from megatron.model.theta import divided_theta
from megatron.run_folder import RunFolder

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_HEAD = """\
# Imported from {source}.
# The keys of the model and its tokenizer. To train it further, add a file with your own keys:
#   python train.py {run}/config.yml YOURS.yml -o finetune=true -o load={run} -o save=NEW
"""
# The keys that every configuration needs. A config file for training replaces their values.
_RUN = {
    "train_iters": 0,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
}


def import_folder(source: Path, target: Path) -> list[str]:
    """Import the model in the folder `source` into the new run folder `target`.

    Returns:
        Lines to print for the user.

    Raises:
        HubError: `source` contains no model that can be imported.
        TokenizerError: The tokenizer.json cannot be read, or has no end-of-document token.
        CheckpointError: Another process is writing `target`.
        FileExistsError: `target` exists and is not empty.
    """
    described = read_json(source, "config.json")
    own = described.get("architectures") == [OWN_CLASS]
    with new_folder(target) as folder:
        try:
            keys = keys_of_export(described) if own else keys_of(described)
        except HubError as error:
            raise HubError(f"{source / 'config.json'}: {error}") from None
        for name in (*_TOKENIZER, TEMPLATE):
            if (source / name).is_file():
                (folder / name).write_bytes(read_in(source, name))
        keys |= _tokenizer_keys(described, folder, target)
        config = _write_config(source, folder, target, keys | _precision(described))
        rows = config.model.make_vocab_size_divisible_by
        shape, tokenizer = shape_of(config, rows), None
        if "tokenizer_type" in keys:
            tokenizer = _tokenizer_in(source, folder, config, rows)
        if own:
            ours = shape_values(config, shape) | {"tie_word_embeddings": shape.tie_weights}
            if described.get("head_size") is None:  # an export of an earlier version
                del ours["head_size"]
            if changed := [
                key for key, value in ours.items() if described.get(key, value) != value
            ]:
                raise HubError(
                    f"{source / 'config.json'}: changed since the export: {', '.join(changed)}; "
                    f"change the keys under {OWN_KEYS} in the same way"
                )
        kind, pos = None if own else class_of(described), positional_of(config)
        layout, name = layout_of(kind, shape, pos), kind.name if kind else OWN_CLASS
        if own and pos.parameters:
            layout["theta"] = Parts(("theta",), 1, (shape.block.num_heads,), (len(pos.parameters),))
        weights = read_weights(source, layout)
        if own and pos.parameters:
            dtype = weights["embedding.word_embeddings.weight"].dtype  # theta is exported as fp32
            weights |= divided_theta(pos, weights.pop("theta").to(dtype))
        about = {"origin": name, "model": identity_of(config, shape, tokenizer)}
        about["shapes"] = {name: list(weight.shape) for name, weight in weights.items()}
        about["config"] = config.to_flat_dict()
        write_import(folder, 0, {"module": weights}, about)
    count = sum(weight.numel() for weight in weights.values())
    lines = [f"{source} ({name}) -> {target}: {shape.num_layers} layers, {count:,} parameters"]
    if tokenizer is None:
        text = "no tokenizer.json or tokenizer.model: name tokenizer_type and vocab_file in"
        lines.insert(0, f"note: {source} has {text} {RunFolder(target).config}")
    return lines


def _precision(described: dict[str, Any]) -> dict[str, str]:
    dtype = described.get("dtype") or described.get("torch_dtype")
    return {"precision": dtype if dtype in ("bfloat16", "float16") else "fp32"}


def _tokenizer_keys(described: dict[str, Any], folder: Path, target: Path) -> dict[str, str]:
    """Return the config keys of the tokenizer, or {} if `folder` contains no tokenizer."""
    if name := fileless_tokenizer(described):
        return {"tokenizer_type": name}
    made, named, model = (folder / name for name in _TOKENIZER)
    found = made.is_file()
    if not found and model.is_file():
        described = read_json(folder, named.name) if named.is_file() else {}
        found = write_tokenizer_json(model, begins=described.get("add_bos_token") is not False)
    if not (found or model.is_file()):
        return {}
    vocab_file = str(target.resolve() / (made if found else model).name)
    return {"tokenizer_type": "HFTokenizer" if found else "SPMTokenizer", "vocab_file": vocab_file}


def _write_config(source: Path, folder: Path, target: Path, keys: dict[str, Any]) -> Config:
    """Write the config.yml of the new run folder, and return its configuration.

    Raises:
        HubError: An entry of config.json has a value that our config does not allow.
    """
    path = RunFolder(folder).config
    head = _HEAD.format(source=json.dumps(str(source)), run=target)
    path.write_text(head + to_yaml(keys | _RUN), encoding="utf-8")
    try:
        return load_config([path])
    except ConfigError as error:
        listed = "\n  ".join(f"{each.key}: {each.text}" for each in error.problems)
        raise HubError(f"{source / 'config.json'} does not fit our keys:\n  {listed}") from None


def _tokenizer_in(source: Path, folder: Path, config: Config, rows: int) -> Tokenizer:
    """Build the tokenizer of an imported model.

    Raises:
        HubError: The tokenizer has ids for which the model has no embedding.
    """
    name = Path(str(config.data.vocab_file)).name
    path = source / name if (source / name).is_file() else folder / name
    data = config.data.model_copy(update={"vocab_file": str(path)})
    tokenizer = tokenizer_of(config.model_copy(update={"data": data}))
    if tokenizer.vocab_size > rows:
        raise HubError(f"{name} has {tokenizer.vocab_size} ids, but the model embeds only {rows}")
    return tokenizer
