"""training/NAME: published training steps, repeated by this project's engine.

The model, groups, optimizer, DeepSpeed engine, schedule, training step and projection of theta are
built from the case's config by the functions that train.py uses. Weight decay reaches the kernel's
parameters, as in the published code. The case holds the tokens.

bf16 cases run under `published_numerics`, and the clamp changes the model's copy of theta only. The
published bf16 curve was made with another optimizer wrapper: it shows the semantics, not digits.

Without rotation or weights that depend on it, the bias of the keys has no gradient: softmax absorbs
it. Adam turns the rounding errors of that gradient into steps, hence the wider tolerance for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megatron.attention import AttentionError
from megatron.config import Config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved import Saved
from megatron.engine.training.deepspeed_engine import job_engine
from megatron.engine.training.loop import train_step
from megatron.engine.training.optimizer import parameter_groups
from megatron.engine.training.theta import TrainedTheta
from megatron.model import GPT
from megatron.parallel.groups import Groups
from tools.parity.models import (
    case_config,
    position_name,
    positional_tensors,
    published_tensors,
    require_divisible,
)
from tools.parity.result import Result

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
RATES = 1e-12
KEY_BIAS = 5e-2
KINDS = {  # name in the curve -> name in `TrainingCase.seen`
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
    """Repeat the steps of one case; `again` leaves out bf16, which is always eager."""
    manifest = json.loads((folder / "manifest.json").read_text())
    with np.load(folder / "curve.npz", allow_pickle=False) as stored:
        curve = dict(stored)
    vocab_size = manifest["padded_vocab_size"]
    config = case_config(folder, ["weight_decay_positional=true"], vocab_size)
    rounded = config.training.precision != "fp32"
    if rounded and again:
        return
    overrides = ["weight_decay_positional=true", f"published_numerics={str(rounded).lower()}"]
    overrides += [f"attention_backend={'eager' if rounded else backend}"]
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
    """A model and its engine at step 0 of a case, and the values recorded at each step.

    Attributes:
        seen: quantity -> its value at each step.
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
        """Train on tokens [steps, micro-batches, batch, seq + 1]."""
        self.engine.train()
        theta = self.model.theta
        trained = TrainedTheta(self.engine, theta, self.model.pos, self.groups)
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
        """Compare the weight decay of each parameter."""
        if "optimizer_groups" not in manifest:
            return
        placed = {id(p): names for names, p in self._published_parameters()}
        chosen, ours, theirs = self.config.optimizer, {}, {}
        for group in parameter_groups(
            self.model, chosen.weight_decay, decay_theta=chosen.weight_decay_positional
        ):
            for param in group["params"]:
                ours |= dict.fromkeys(placed[id(param)], group["weight_decay"])
        for group in manifest["optimizer_groups"]:
            theirs |= dict.fromkeys(map(position_name, group["params"]), group["weight_decay"])
        result.expect("weight decay of each parameter", ours, theirs)

    def compare(self, curve: dict[str, np.ndarray], manifest: dict, result: Result) -> None:
        """Compare every quantity that the curve holds."""
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
            if len(ours) == len(published) + 1:  # the curve leaves out the start
                ours = ours[1:]
            elif KINDS[kind] == "kernel":  # the published first forward pass clamps the start
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

    def _published_parameters(self) -> Iterator[tuple[list[str], torch.nn.Parameter]]:
        """Each parameter with its names in the published code."""
        for name, param in self.model.named_parameters():
            yield list(published_tensors(self.model, {name: param})), param

    def _bounds(self, name: str) -> tuple[float, float]:
        """(low, high) of the theta column with this published name; infinite for T5's table."""
        columns = self.model.pos.parameters
        bounds = ((p.low, p.high) for p in columns if name.endswith(f".{p.name}"))
        return next(bounds, (-np.inf, np.inf))

    def _note(self, key: str, value: object) -> None:
        self.seen.setdefault(key, []).append(value)

    def _note_kernel(self, kind: str, theta_HN: torch.Tensor | None) -> None:
        """Record theta; if it is None, fixed slopes that published files store as parameters."""
        for name, tensor in positional_tensors(self.model, theta_HN).items():
            self._note(f"{kind}/{name}", tensor.detach().float().cpu().numpy().copy())
