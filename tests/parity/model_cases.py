"""Check the parity cases `models/NAME`: logits, losses and gradients of a published checkpoint.

The code of train.py builds the model from the case's config, and loads the published weights in the
same way as for the config key `load`. In float64 and float32 the requested attention backend is
used. Numbers that the published code computed in bf16 are compared with those of the attention
backend `eager` with the setting `published_numerics: true`.

The norm, the sum and the first four values of each gradient are compared. Their errors are relative
to the norm. The error of the sum is also divided by the square root of the element count. Gradients
of theta (the parameters of KERPLE or T5 embeddings) are compared in full. If the published run had
several tensor-parallel ranks, the case may contain only the first rank's shard of each gradient.
If the norm of the word embedding's gradient is that of a shard, all other gradients in the case are
assumed to be shards, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.attention import AttentionError
from megatron.engine.build import attention_of, positional_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.model_shape import shape_of
from megatron.engine.neox import layout
from megatron.engine.neox import read as neox
from megatron.model import GPT, Plan
from megatron.model.theta import BY_HEADS
from megatron.numerics import PublishedNumerics
from megatron.parallel.groups import ALONE, TensorGroup
from tests.parity.case_files import case_config, read_arrays, read_manifest, require_divisible
from tests.parity.published_tensors import (
    first_shards,
    gradients,
    position_name,
    positional_tensors,
)
from tests.parity.result import Result

EMBEDDING = "0.word_embeddings.weight"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Tolerances are relative for gradients and for the fp32 mean loss, and absolute for all others.
TOLERANCES = {
    "fp64": {"logits": 1e-9, "loss": 1e-9, "token losses": 1e-9, "norms": 1e-8, "values": 1e-8},
    "fp32": {"logits": 5e-5, "loss": 1e-5, "token losses": 5e-5, "norms": 5e-5, "values": 2e-4},
    "bf16": {"logits": 0.1, "loss": 1e-2},
}


def check_model(
    folder: Path,
    name: str,
    *,
    backend: str = "eager",
    device: str = "cpu",
    again: bool = False,
    tp: TensorGroup = ALONE,
) -> Iterator[Result]:
    """Check a model, and yield one result for each precision in the case.

    The model is sharded over the ranks of `tp`, which must all call this function. bf16 is always
    checked with `eager`, whatever `backend` is. If `again` is true, bf16 is skipped, because it was
    checked when this function was called for another backend. If the backend does not support the
    case, `Result.refusal` tells why.
    """
    manifest, expected = read_manifest(folder), read_arrays(folder / "expected.npz")
    lengths = sorted(int(key.removeprefix("tokens_L")) for key in expected if "tokens_L" in key)
    for precision in DTYPES:
        stored = (key.replace("bf16_as_fp32", "bf16") for key in expected)
        if not any(f"_{precision}_" in key for key in stored) or (again and precision == "bf16"):
            continue
        used = "eager" if precision == "bf16" else backend
        result = Result(f"{name} {precision} {used}")
        try:
            case = ModelCase(folder, manifest, expected, precision, used, device, result, tp)
            for length in lengths:
                case.check(length)
        except AttentionError as error:
            result.refusal = str(error)
        yield result


class ModelCase:
    """A model in one precision, and the published numbers with which its outputs are compared."""

    def __init__(
        self,
        folder: Path,
        manifest: dict,
        expected: dict[str, np.ndarray],
        precision: str,
        backend: str,
        device: str,
        result: Result,
        tp: TensorGroup,
    ):
        self.manifest, self.expected, self.result = manifest, expected, result
        self.precision, self.tolerances = precision, TOLERANCES[precision]
        self.device = torch.device(device)
        overrides = [f"attention_backend={backend}", "fp16=null", "bf16=null"]
        if precision == "bf16":
            overrides += ["precision=bf16", "published_numerics=true"]
        else:
            overrides += ["precision=fp32"]
        vocab_size = manifest["padded_vocab_size"]
        config = case_config(folder, overrides, vocab_size)
        require_divisible(config, vocab_size, tp.size)
        checkpoint = folder / manifest.get("checkpoint", "checkpoint")
        tag = manifest.get("tag") or (checkpoint / "latest").read_text().strip()
        saved = Saved(checkpoint, tag)
        stored = neox.read(saved.path)
        self.shape = stored.shape
        coarse = any(tensor.dtype == torch.bfloat16 for tensor in stored.weights.values())
        # A bf16 checkpoint contains rounded buffers, so our buffers are rounded in all precisions.
        pos = positional_of(config, PublishedNumerics(torch.bfloat16) if coarse else None)
        attend = attention_of(config, pos, device)
        model = GPT(Plan(shape_of(config, vocab_size), pos, attend, config.training.seed, tp))
        self.model = model.to(DTYPES[precision])
        if coarse and layout.FIXED in stored.buffers:  # published slopes: rounded, then clamped
            slopes = stored.buffers[layout.FIXED].float().view(-1, 1)
            slopes = BY_HEADS.slice(slopes, tp.rank, tp.size)
            fixed = self.model.embedding.fixed_theta
            assert fixed is not None, "buffers of fixed slopes mean kerple_power_original"
            fixed.value.copy_(slopes)
        load_weights(self.model, saved)
        self.model.to(self.device)
        self._check_clamped(1e-4 if coarse else 1e-8)

    def check(self, length: int) -> None:
        """Compare the logits, losses and gradients at one sequence length."""
        end = f"{self.precision}_L{length}"
        tokens = torch.from_numpy(self.expected[f"tokens_L{length}"]).to(self.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        compare, tolerances = self.result.compare, self.tolerances
        logits_key = f"logits_{end}"
        if self.precision == "bf16":
            logits_key = f"logits_bf16_as_fp32_L{length}"
        if logits_key in self.expected:
            with torch.no_grad():
                logits = self.model(inputs)[:, self.expected[f"positions_L{length}"]]
            compare("logits", _numpy(logits), self.expected[logits_key], tolerances["logits"])
        self.model.zero_grad()
        losses = self.model(inputs, targets)
        losses.mean().backward()
        if f"loss_{end}" in self.expected:
            published = self.expected[f"loss_{end}"]
            scale = np.abs(published) if self.precision == "fp32" else 1.0
            compare("loss", losses.mean().item(), published, tolerances["loss"], scale=scale)
        if f"token_loss_{end}" in self.expected:
            stored = self.expected[f"token_loss_{end}"]
            compare("token losses", _numpy(losses), stored, tolerances["token losses"])
        if f"grad_l2_{end}" in self.expected:
            self._check_gradients(end)

    def _check_gradients(self, end: str) -> None:
        names = [position_name(name) for name in self.manifest["grad_param_names"]]
        norms = self.expected[f"grad_l2_{end}"]
        full = gradients(self.model)
        moved = [name for name, norm in zip(names, norms, strict=True) if norm or name in full]
        self.result.expect("parameters with a gradient", sorted(full), sorted(moved))
        recorded = dict(zip(names, norms, strict=True)).get(EMBEDDING, 0.0)
        shards = first_shards(full, self.shape)
        apart = [abs(grads[EMBEDDING].norm().item() - recorded) for grads in (full, shards)]
        ours = {k: _numpy(g) for k, g in (shards if apart[1] < apart[0] else full).items()}
        floor = 1e-6 * float(np.linalg.norm(norms))  # smaller gradients are only rounding errors
        norm_tolerance, tolerance = self.tolerances["norms"], self.tolerances["values"]
        for i, name in enumerate(names):
            if name not in ours:
                continue
            flat, norm = ours[name].ravel(), max(float(norms[i]), floor)
            first = self.expected[f"grad_first4_{end}"][i][: len(flat)]
            size, total = norm * len(flat) ** 0.5, self.expected[f"grad_sum_{end}"][i]
            compare = self.result.compare
            compare("gradient norms", np.linalg.norm(flat), norms[i], norm_tolerance, scale=norm)
            compare("gradient sums", flat.sum(), total, tolerance, scale=size)
            compare("gradient values", flat[:4], first, tolerance, scale=norm)
        start = f"grad_{end}/"
        for key in (key for key in self.expected if key.startswith(start)):
            mine, theirs = ours[position_name(key.removeprefix(start))], self.expected[key]
            scale = max(float(np.abs(theirs).max()), floor)
            self.result.compare("kernel gradients", mine, theirs, tolerance, scale=scale)

    def _check_clamped(self, tolerance: float) -> None:
        """Compare KERPLE's parameters after clamping with those of the published code."""
        full = positional_tensors(self.model, self.model.theta)
        shards = first_shards(full, self.shape)
        for key in (key for key in self.expected if key.startswith("after_forward/")):
            name, stored = key.removeprefix("after_forward/"), self.expected[key]
            if name not in full:
                self.result.faults.append(f"{name}: not in this model")
                continue
            ours = shards[name] if stored.size < full[name].numel() else full[name]
            self.result.compare("clamped kernel", _numpy(ours), stored, tolerance)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
