"""Read config.json and the safetensors files of a model folder. Pickles and code are never read.

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
_BUFFERS = re.compile(r".*\.(attn|attention)\.(masked_)?bias|.*\.rotary_emb\.inv_freq")
_OWN_PREFIX = re.compile(r"^model\.(position_bias\.)?")  # in our class, but not in a checkpoint
_OUTPUT = ("lm_head.weight", "embed_out.weight")  # GPTNeoX has both names


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder of unknown origin. The file may be missing.

    Raises:
        HubError: The file is a link that leads out of the folder.
    """
    path, root = folder / name, folder.resolve()
    allowed = [root, root.parent.parent / "blobs"][: 1 + (root.parent.name == "snapshots")]
    target = path.resolve()
    if not any(target.is_relative_to(each) for each in allowed):
        raise HubError(
            f"{path}: is a link out of the folder, to {target}; if you trust it, put a copy of "
            "that file in its place"
        )
    return path


def read_in(folder: Path, name: str) -> bytes:
    """Return the content of a small file in a folder of unknown origin.

    Raises:
        HubError: The file is missing or too large, or is a link that leads out of the folder.
    """
    path = file_in(folder, name)
    try:
        return read_small(path, _MOST_BYTES)
    except OSError as error:
        raise HubError(f"{path}: cannot be read ({error})") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in a folder of unknown origin.

    Raises:
        HubError: The file cannot be read, or does not contain a JSON object.
    """
    try:
        content = parse_json(read_in(folder, name))
    except ValueError as error:
        raise HubError(f"{folder / name}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise HubError(f"{folder / name}: is not a JSON object")
    return content


def read_weights(folder: Path, layout: Mapping[str, Parts]) -> dict[str, Tensor]:
    """Read the safetensors files of a folder, and return the weights of our model by name.

    Args:
        folder: The folder.
        layout: Maps the name of each of our weights to the corresponding tensors in the files.

    Raises:
        HubError: A file is missing or damaged.
        HubError: Tensors are missing, unknown or not finite, or have a wrong shape or dtype. The
            error lists these tensors.
    """
    wanted = {name: shape for parts in layout.values() for name, shape in parts.shapes()}
    found = _open(folder)
    # Files of the base class leave out the first part of each name.
    whole = {name.partition(".")[2]: name for name in wanted if name not in _OUTPUT}
    found = {name if name in wanted else whole.get(name, name): x for name, x in found.items()}
    for name in [*found]:
        own = _OWN_PREFIX.sub("", name)
        if name not in wanted and own in wanted:
            found[own] = found.pop(name)
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
    _refuse(f"{folder} is not the model that its config.json describes", problems)
    weights: dict[str, Tensor] = {}
    for name, parts in layout.items():
        stored = {each: found[each][...] for each in parts.names}
        problems += [each for each, tensor in stored.items() if not tensor.isfinite().all()]
        weights[name] = parts.join(list(stored.values()))
    _refuse(f"{folder} has weights that are NaN or infinite", problems)
    return weights


def _refuse(text: str, problems: list[str]) -> None:
    """Raise an error that lists the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        raise HubError("\n  ".join([f"{text}:", *problems[:_MOST_LISTED], *more]))


def _open(folder: Path) -> dict[str, Any]:
    """Open the safetensors files, and return a dict from tensor name to slice.

    Indexing a slice with `[...]` reads the tensor.
    """
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
    """Return a dict from the path of each file with weights to the names of its tensors."""
    # An empty set of names means all tensors of the file.
    whole = file_in(folder, "model.safetensors")
    index = folder / "model.safetensors.index.json"
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
    places = read_json(folder, index.name).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise HubError(f"{index}: has no weight_map")
    files: dict[Path, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise HubError(f"{index}: {tensor!r} is in {name!r}, which names no file beside it")
        files.setdefault(file_in(folder, name), set()).add(tensor)
    return files


def _equals_words(found: Mapping[str, Any], layout: Mapping[str, Parts], name: str) -> bool:
    """Return whether a tensor has the same values as the token embedding."""
    words = layout["embedding.word_embeddings.weight"].names[0]
    return words in found and torch.equal(found[name][...], found[words][...])
