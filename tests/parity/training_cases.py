"""Check the parity cases `training/NAME`: repeat published training steps and compare the values.

The code of train.py builds the model, process groups, optimizer, DeepSpeed engine and schedule from
the case's config, takes the training steps, and clamps theta (the parameters of KERPLE or T5
embeddings) to its bounds. The tokens are read from the case. As in the published code, weight decay
also applies to theta.

bf16 cases run with the setting `published_numerics`. Clamping then changes only the model's
bf16 theta, as in the published code, and not theta's fp32 master copy in the optimizer. The
published bf16 curve was recorded with another optimizer wrapper. Our values therefore agree with
this curve only within a wide tolerance.

The bias of the keys in `query_key_value` has no gradient in most models, because the softmax
cancels it. Only rotary or multiplicative embeddings give that bias a gradient. In the other models,
the computed gradient consists of rounding errors. Adam divides a gradient by its magnitude, so it
still takes full steps. The tolerance of that bias is therefore wider (`KEY_BIAS`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megatron.attention import AttentionError
from megatron.config import Config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.training.deepspeed_engine import job_engine
from megatron.engine.training.loop import train_step
from megatron.engine.training.optimizer import parameter_groups
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.model import GPT
from megatron.parallel.groups import Groups
from tests.parity.case_files import case_config, read_arrays, read_manifest, require_divisible
from tests.parity.published_tensors import (
    position_name,
    positional_tensors,
    published_tensors,
)
from tests.parity.result import Result

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
RATES = 1e-12
KEY_BIAS = 5e-2
KINDS = {  # maps the name of a quantity in curve.npz to its name in `TrainingCase.seen`
    "kernel": "kernel",
    "kernel_before_stats_clamp": "before clamp",
    "kernel_bf16_after_stats": "kernel",
    "kernel_bf16_before_stats": "before clamp",
    "kernel_fp32_master": "master",
    "kernel_used_in_forward": "used",
}


def check_training(
    folder: Path, name: str, groups: Groups, *, backend: str = "eager", again: bool = False
) -> Iterator[Result]:
    """Repeat the training steps of one case, and yield its result.

    If `again` is true, the case was already checked with another backend. A bf16 case is then
    skipped, because bf16 is always checked with the backend `eager`.
    """
    manifest, curve = read_manifest(folder), read_arrays(folder / "curve.npz")
    vocab_size = manifest["padded_vocab_size"]
    config = case_config(folder, ["weight_decay_positional=true"], vocab_size)
    rounded = config.training.precision != "fp32"
    if rounded and again:
        return
    overrides = ["weight_decay_positional=true", f"published_numerics={str(rounded).lower()}"]
    overrides.append(f"attention_backend={'eager' if rounded else backend}")
    config = case_config(folder, overrides, vocab_size)
    require_divisible(config, vocab_size, groups.model.size)
    result = Result(f"{name} {config.training.precision} {config.model.attention_backend}")
    try:
        case = TrainingCase(folder, config, vocab_size, groups)
    except AttentionError as error:
        result.refusal = str(error)
        yield result
        return
    case.check_groups(manifest, result)
    case.run(curve["tokens"])
    case.compare(curve, manifest, result)
    yield result


class TrainingCase:
    """A case: a model, its DeepSpeed engine, and the values recorded while the model is trained.

    Attributes:
        seen: Maps each recorded quantity to the list of its values, one for each step.
    """

    def __init__(self, folder: Path, config: Config, vocab_size: int, groups: Groups):
        self.config, self.groups = config, groups
        self.model = GPT(
            plan_of(config, vocab_size, device_type=groups.device.type, tp=groups.model)
        )
        start = folder / "checkpoint_init"
        load_weights(self.model, Saved(start, (start / "latest").read_text().strip()))
        self.engine, _ = job_engine(config, self.model, groups)
        self.seen: dict[str, list] = {}

    def run(self, tokens: np.ndarray) -> None:
        """Train on `tokens` of shape [steps, micro-batches, batch, seq + 1], and record values."""
        self.engine.train()
        theta = self.model.theta
        trained = TrainedTheta(self.engine, self.model.theta_parts, self.model.pos, self.groups)
        self._note_kernel("kernel", theta)
        for step_tokens in tokens:
            self._note("lr_used", self.engine.get_lr()[0])
            self._note_kernel("used", theta)
            batches = iter(step_tokens)
            loss, norm = train_step(self.engine, batches, len(step_tokens), self.groups)
            self._note("loss", loss.item())
            assert norm is not None, "the optimizer clips gradients, so it knows their norm"
            self._note("norm", float(norm))
            self._note("lr_after", self.engine.get_lr()[0])
            self._note_kernel("before clamp", theta)
            if theta is not None:
                self._note_kernel("master", trained.master())
                trained.project()
            self._note_kernel("kernel", theta)

    def check_groups(self, manifest: dict, result: Result) -> None:
        """Compare the weight decay of each parameter with `optimizer_groups` of the manifest."""
        if "optimizer_groups" not in manifest:
            return
        params = self.model.named_parameters()
        placed = {id(p): published_tensors(self.model, {name: p}) for name, p in params}
        ours, theirs = {}, {}
        for group in parameter_groups(self.model, self.config.optimizer):
            for param in group["params"]:
                ours |= dict.fromkeys(placed[id(param)], group["weight_decay"])
        for group in manifest["optimizer_groups"]:
            theirs |= dict.fromkeys(map(position_name, group["params"]), group["weight_decay"])
        result.expect("weight decay of each parameter", ours, theirs)

    def compare(self, curve: dict[str, np.ndarray], manifest: dict, result: Result) -> None:
        """Compare every quantity in `curve`, the arrays of curve.npz, with the recorded values."""
        tolerance = TOLERANCES[self.config.training.precision]
        seen = {key: np.array(values) for key, values in self.seen.items()}
        result.compare("loss", seen["loss"], curve["loss"], tolerance)
        norm = curve.get("grad_norm_before_clip", curve.get("grad_norm"))
        if norm is not None:
            result.compare("gradient norm", seen["norm"], norm, tolerance, scale=norm)
        for key in ("lr_used", "lr_after"):
            if key in curve:
                scale = np.maximum(curve[key], 1e-30)
                result.compare("learning rate", seen[key], curve[key], RATES, scale=scale)
        for key, published in curve.items():
            kind, _, name = key.partition("/")
            if kind not in KINDS:
                continue
            ours = seen.get(f"{KINDS[kind]}/{name}")
            if ours is None:
                result.faults.append(f"{key}: not in this model")
                continue
            if len(ours) == len(published) + 1:  # the curve does not contain the initial value
                ours = ours[1:]
            elif KINDS[kind] == "kernel":  # the published initial value is not clamped yet
                low, high = self._bounds(name)
                published = np.concatenate([published[:1].clip(low, high), published[1:]])
            result.compare(KINDS[kind], ours.reshape(published.shape), published, tolerance)
        if "final_l2" in curve:
            names = [position_name(name) for name in manifest["final_param_names"]]
            self._compare_final(curve, names, result, tolerance)

    def _compare_final(
        self, curve: dict[str, np.ndarray], names: list[str], result: Result, tolerance: float
    ) -> None:
        final = published_tensors(self.model, dict(self.model.named_parameters()))
        fixed = positional_tensors(self.model, None) if self.model.theta is None else {}
        final |= {name: tensor for name, tensor in fixed.items() if name in names}
        result.expect("parameters", sorted(final), sorted(names))
        for i, name in enumerate(names):
            if name in final:
                flat = final[name].detach().double().numpy().ravel()
                norm, total = curve["final_l2"][i], curve["final_sum"][i]
                noisy = name.endswith("query_key_value.bias")
                label, allowed = ("final biases", KEY_BIAS) if noisy else ("final", tolerance)
                result.compare(label, np.linalg.norm(flat), norm, allowed, scale=norm)
                size = norm * len(flat) ** 0.5
                result.compare(label, flat.sum(), total, allowed, scale=size)

    def _bounds(self, name: str) -> tuple[float, float]:
        """Return the bounds (low, high) of the KERPLE parameter with the published name `name`.

        For T5's table, which has no bounds, return (-inf, inf).
        """
        columns = self.model.pos.parameters
        bounds = ((p.low, p.high) for p in columns if name.endswith(f".{p.name}"))
        return next(bounds, (-np.inf, np.inf))

    def _note(self, key: str, value: object) -> None:
        self.seen.setdefault(key, []).append(value)

    def _note_kernel(self, kind: str, theta_HN: torch.Tensor | None) -> None:
        """Record the values of theta (the learned positional parameters) in `seen`.

        Theta is converted to the tensors that the published code stores. The quantity in `seen` is
        named `kind`/NAME, where NAME is the published name of the tensor.

        If theta is None, record the fixed slopes of the embedding `kerple_power_original`, because
        published files store these slopes as parameters. For any other embedding without theta,
        nothing is recorded.
        """
        for name, tensor in positional_tensors(self.model, theta_HN).items():
            self._note(f"{kind}/{name}", tensor.detach().float().cpu().numpy().copy())
