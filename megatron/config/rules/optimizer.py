"""Refuse settings of the optimizer and of the learning rate that do not fit together."""

from megatron.config.rules.relation import Found, relation


@relation("min_lr", "lr")
def _min_lr(low: float, lr: float) -> Found | None:
    if low > lr:
        return "min_lr", f"{low} is above optimizer.params.lr {lr}; write at most {lr}"


@relation("type", "momentum")
def _momentum(kind: str, momentum: float) -> Found | None:
    if kind in ("adam", "fusedadam") and momentum != 0:
        text = f"{momentum}, but adam's momentum is betas[0]"
        return "momentum", f"{text}; drop momentum, or write type: sgd"
    if kind == "muon" and momentum >= 1:
        return "momentum", f"{momentum} never forgets a gradient; write a number below 1, e.g. 0.95"


@relation("warmup", "decay_style", "wsd_decay_ratio")
def _warmup(warmup: float, style: str, decay: float) -> Found | None:
    if style == "wsd" and warmup + decay > 1:
        text = f"{warmup} + wsd_decay_ratio {decay} is above 1"
        return "warmup", f"{text}; write at most {1 - decay:g}"
    if style != "wsd" and warmup > 0.5:
        text = f"{warmup} of lr_decay_iters: the schedule also freezes for that fraction at its end"
        return "warmup", f"{text}, so above 0.5 it never reaches lr; write at most 0.5"
