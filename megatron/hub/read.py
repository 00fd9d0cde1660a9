"""Read a folder of transformers: config.json and safetensors, never pickles or code.

The weights are in `model.safetensors`, or in the files that `model.safetensors.index.json` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.engine.errors import HubError
from megatron.files import parse_json, read_small
from megatron.hub.weights import Parts

_MOST_BYTES = 1 << 27
_MOST_LISTED = 12
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Buffers of older versions, whose values follow from config.json.
_BUFFERS = re.compile(r".*\.(attention\.(masked_)?bias|rotary_emb\.inv_freq)")
_OUTPUT = ("lm_head.weight", "embed_out.weight")  # GPTNeoX has both names


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of unknown origin.

    Raises:
        HubError: The file is missing, or does not contain a JSON object.
    """
    try:
        content = parse_json(read_small(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise HubError(f"{path}: is not a JSON object")
    return content


def read_weights(folder: Path, layout: Mapping[str, Parts]) -> dict[str, Tensor]:
    """Read our weights from the safetensors of `folder`.

    Args:
        layout: Maps the name of each of our weights to the tensors in the files that form it.

    Raises:
        HubError: A file is missing or damaged, or the tensors are not those of the model.
            The error lists every tensor that is missing, unknown, or has a wrong shape or dtype.
    """
    wanted = {name: shape for parts in layout.values() for name, shape in parts.shapes()}
    found = _open(folder)
    if _OUTPUT[1] in wanted and _OUTPUT[0] in found:
        found[_OUTPUT[1]] = found.pop(_OUTPUT[0])
    problems = [f"{name}: missing" for name in wanted if name not in found]
    for name, stored in found.items():
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if name not in wanted:
            tied = name in _OUTPUT and "output.weight" not in layout
            if not _BUFFERS.fullmatch(name) and not (tied and _equals_words(found, layout, name)):
                problems.append(f"{name!r}: not in the model that config.json describes")
        elif shape != wanted[name]:
            problems.append(f"{name}: {shape}, but config.json describes {wanted[name]}")
        elif dtype not in _FLOATS:
            problems.append(f"{name}: {dtype} numbers; only {', '.join(sorted(_FLOATS))} are read")
    if problems:
        more = [f"and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        listed = "\n  ".join([*problems[:_MOST_LISTED], *more])
        raise HubError(f"{folder} is not the model that its config.json describes:\n  {listed}")
    return {
        name: parts.join([found[each][...] for each in parts.names])
        for name, parts in layout.items()
    }


def _open(folder: Path) -> dict[str, Any]:
    """Return a dict from tensor name to safetensors slice. `slice[...]` reads the tensor."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise HubError("needs `pip install -r requirements-hub.txt`") from None
    tensors: dict[str, Any] = {}
    for path, names in _files(folder).items():
        try:
            if not path.is_file():
                raise OSError("there is no such file")
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise HubError(f"{path}: cannot be read ({error})") from None
        there = set(file.keys())
        if lost := sorted((names or there) - there):
            raise HubError(f"{path}: has no {lost[0]!r}, which the index places there")
        tensors |= {each: file.get_slice(each) for each in names or there}
    return dict(sorted(tensors.items()))


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return a dict from file to the names of the tensors in it; an empty set means all."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return {whole: set()}
    if not index.exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if not pickles:
            raise HubError(f"{folder}: has neither {whole.name} nor {index.name}")
        raise HubError(
            f"{folder}: has its weights only as {pickles[0]}, a pickle, which can run code and is "
            "not read; if you trust it, let transformers write safetensors: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise HubError(f"{index}: has no weight_map")
    files: dict[Path, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise HubError(f"{index}: {tensor!r} is in {name!r}, which names no file beside it")
        files.setdefault(folder / name, set()).add(tensor)
    return files


def _equals_words(found: Mapping[str, Any], layout: Mapping[str, Parts], name: str) -> bool:
    """Return whether the tensor `name` has the same values as the token embedding."""
    words = layout["embedding.word_embeddings.weight"].names[0]
    return words in found and torch.equal(found[name][...], found[words][...])
