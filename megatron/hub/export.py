"""Export a run as a folder from which `transformers` loads the model and the tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megatron.config import Config
from megatron.config.per_layer import values_of
from megatron.data.tokenizers.fast_bpe import DIFFICULT_TEXTS
from megatron.engine.build import positional_options
from megatron.engine.checkpoint.publish import why_not_written
from megatron.engine.errors import HubError
from megatron.engine.open_run import OpenRun
from megatron.hub.bundle import bundle
from megatron.hub.classes import shape_values
from megatron.hub.config_keys import OWN_CLASS, OWN_KEYS, hub_config, misfits, own_keys
from megatron.hub.model_card import model_card
from megatron.hub.tokenizer import TEMPLATE, OtherTokensError, chat_template, write_tokenizer
from megatron.hub.weights import layout_of
from megatron.model import GPT
from megatron.model.theta import is_theta
from megatron.parallel.rng import named_generator
from megatron.version import __version__

CODE = "modeling_kerple"
"""The name of the Python file of an export, without the suffix .py."""
RUN = "kerple_run"
"""The entry of config.json that names the run (`lineage` in `run.json`) and its step."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Maps the dtype in which logits are compared to the largest accepted difference.

It holds for logits up to 5. For larger logits, it grows with the largest one."""
AUTO_CLASSES = {
    "AutoConfig": "KerpleConfig",
    "AutoModel": "KerpleModel",
    "AutoModelForCausalLM": OWN_CLASS,
    "AutoModelForSequenceClassification": "KerpleForSequenceClassification",
}
# Maps names of weights in a checkpoint to those in our class. Others get the prefix `model.`.
_NAMES = {"theta": "model.position_bias.theta", "output.weight": "output.weight"}
_SHARD = "5GB"
UNLIMITED = 1 << 20
"""The `max_position_embeddings` of a model without a limit. Programs never pass more tokens."""
# The largest number of tokens in a text for which the logits of both models are compared.
_LONGEST = 1024


@dataclass(frozen=True)
class HubModel:
    """A model in the storage format of transformers.

    Attributes:
        config: The content of config.json.
        weights: Maps the name of each weight in transformers to the weight.
        code: The content of the Python file that defines the model's class. It is "" if
            transformers has the class.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor] = field(repr=False)
    code: str = field(default="", repr=False)


def export(run: OpenRun, folder: Path, licence: str = "unknown") -> list[str]:
    """Write a run's model, tokenizer and model card to the empty folder `folder`.

    The written files are then loaded to check that the export gives the same logits and token ids
    as the run.

    Args:
        run: The run to export.
        folder: The empty folder to which the files are written.
        licence: The name of the licence, as on the Hugging Face hub.

    Returns:
        Lines to print for the user.

    Raises:
        HubError: The model or the tokenizer cannot be exported.
        HubError: The logits or token ids of the export differ from those of the run.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub = _hub_model(run)
    _write_configs(hub, run, folder)
    try:
        write_tokenizer(run.tokenizer, folder)
    except OtherTokensError:
        if hub.code:
            raise
        # For some classes, such as Qwen2, transformers has a tokenizer whatever the files say.
        hub = _own_class(run)
        _write_configs(hub, run, folder)
        write_tokenizer(run.tokenizer, folder)
    if template := chat_template(run.config.data.vocab_file):
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    _write_weights(hub, folder)
    card = model_card(run, own_class=bool(hub.code), licence=licence)
    (folder / "README.md").write_text(card, encoding="utf-8")
    difference = _compare(folder, run, remote_code=bool(hub.code))
    code = f"with its code in {CODE}.py" if hub.code else "without code"
    return [
        f"{hub.config['architectures'][0]} in {hub.config['dtype']}, {code}",
        f"compared with this project: logits differ by at most {difference:.1e}, token ids agree",
    ]


def _hub_model(run: OpenRun) -> HubModel:
    """Convert the run's model to a class of transformers, or to our own class if none fits."""
    # The classes of transformers compute rotary angles in fp32.
    if run.dtype is torch.float64 or misfits(run.config):
        return _own_class(run)
    kind, about = hub_config(run.config)
    weights, state = {}, run.model.state_dict()
    for name, parts in layout_of(kind, run.model.shape, run.model.pos).items():
        weights |= dict(zip(parts.names, parts.split(state[name]), strict=True))
    return HubModel(about | _common(run), weights)


def _own_class(run: OpenRun) -> HubModel:
    """Convert the run's model to our class `KerpleForCausalLM`, with the code of this class."""
    config, model = run.config, run.model
    if config.model.published_numerics:
        raise HubError(
            "published_numerics: the export cannot round numbers as the released code does; "
            "export with -o published_numerics=false, which computes in fp32 at least"
        )
    weights = {name: x for name, x in model.state_dict().items() if not is_theta(name)}
    if model.pos.parameters:
        weights["theta"] = _theta(model)
    weights = {_NAMES.get(name, f"model.{name}"): x for name, x in weights.items()}
    terms = (term.name for term in model.pos.terms)
    about = {
        "model_type": "kerple",
        "architectures": [OWN_CLASS],
        "auto_map": {auto: f"{CODE}.{name}" for auto, name in AUTO_CLASSES.items()},
        # In other classes, the vector of a padding token, which is also end-of-document, is frozen.
        "pad_token_id": run.tokenizer.eod,
        **_values(config, model),
    }
    return HubModel(about | _common(run), weights, bundle(terms))


def _theta(model: GPT) -> Tensor:
    """Return the parameters of the positional embedding, [heads, parameters], in fp32 or wider."""
    no_tokens_BT = torch.zeros(1, 0, dtype=torch.int64)
    with torch.no_grad():
        _, theta_HN = model.embedding(no_tokens_BT)
    return theta_HN


def _common(run: OpenRun) -> dict[str, Any]:
    """Return the entries that config.json contains for every model class."""
    saved: Any = run.saved  # None for a model that was never saved
    lineage, step = (saved.lineage, saved.step) if saved else (None, None)
    return {
        "dtype": str(run.dtype).removeprefix("torch."),
        "eos_token_id": run.tokenizer.eod,
        "tie_word_embeddings": run.model.shape.tie_weights,
        "vocab_size": run.model.shape.vocab_size,
        OWN_KEYS: own_keys(run.config),
        RUN: {"run": lineage, "step": step, "version": __version__},
    }


def _values(config: Config, model: GPT) -> dict[str, Any]:
    """Return the arguments of `KerpleConfig` that describe the model."""
    m, shape, documents = config.model, model.shape, model.documents
    options = {name: positional_options(m, name) for name in values_of(m.pos_emb)}
    limited = model.longest_text is not None
    return shape_values(config, shape) | {
        "max_position_embeddings": shape.max_positions if limited else UNLIMITED,
        "pos_emb_options": options,
        "distance_scale": config.evaluation.eval_distance_scale,
        "document_end": None if documents is None else documents.end,
        "restart_positions": documents is not None and documents.restart_positions,
    }


def _write_configs(hub: HubModel, run: OpenRun, folder: Path) -> None:
    """Write the configuration and the code of an export to `folder`."""
    end, unused = run.tokenizer.eod, range(run.tokenizer.vocab_size, run.model.shape.vocab_size)
    ends = sorted(run.tokenizer.ends) if len(run.tokenizer.ends) > 1 else end
    generation = {"eos_token_id": ends, "pad_token_id": end, "suppress_tokens": [*unused] or None}
    for name, content in (("config", hub.config), ("generation_config", generation)):
        text = json.dumps(content, indent=2, default=dict)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if hub.code:
        (folder / f"{CODE}.py").write_text(hub.code, encoding="utf-8")


def _write_weights(hub: HubModel, folder: Path) -> None:
    try:
        save_torch_state_dict(hub.weights, folder, max_shard_size=_SHARD)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"the weights: {why_not_written(folder, error)} ({folder})") from None
    for path in folder.glob("*.safetensors"):  # written for their owner alone
        path.chmod((folder / "config.json").stat().st_mode)


@torch.no_grad()
def _compare(folder: Path, run: OpenRun, *, remote_code: bool) -> float:
    """Return the largest difference between the logits of a run and the logits of its export.

    Raises:
        HubError: The difference is too large.
    """
    # With and without a KV cache, in fp32, or in float64 if the weights are float64.
    dtype = torch.promote_types(run.dtype, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=remote_code, local_files_only=True
    )
    ids_BT = _prompts(run)
    if theirs.config.model_type == "gptj":  # whose table of angles has no more rows
        ids_BT = ids_BT[:, : theirs.config.max_position_embeddings]
    wanted_BTV = run.model.to(dtype)(ids_BT)
    first = theirs(ids_BT[:, : ids_BT.shape[1] // 2], use_cache=True)
    second = theirs(ids_BT[:, first.logits.shape[1] :], past_key_values=first.past_key_values)
    cached_BTV = torch.cat((first.logits, second.logits), dim=1)
    found = (theirs(ids_BT, use_cache=False).logits, cached_BTV)
    difference = max(float((logits_BTV - wanted_BTV).abs().max()) for logits_BTV in found)
    most = TOLERANCE[dtype] * max(1.0, float(wanted_BTV.abs().max()) / 5)
    if not difference <= most:
        raise HubError(
            f"the exported model's logits differ from ours by {difference:.1e}, more than "
            f"{most:.0e} ({dtype}), so there is no export"
        )
    return difference


def _prompts(run: OpenRun) -> Tensor:
    """Return the token ids of two texts of equal length, int64 [2, length]."""
    # Words that are difficult to tokenise, and random tokens.
    length = min(2 * run.config.model.seq_length, _LONGEST)
    length = min(length, run.model.embedding.positions or length)
    words: list[int] = run.tokenizer.encode(" ".join(DIFFICULT_TEXTS)).tolist()
    words = (words * (length // len(words) + 1))[-length:]
    generator = named_generator(0, "export")
    random = torch.randint(run.tokenizer.vocab_size, (length,), generator=generator)
    return torch.stack((torch.tensor(words), random))
