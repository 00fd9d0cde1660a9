"""Check that the positional embedding fits the model's other sizes."""

from collections.abc import Mapping
from typing import Any

from megatron.config.choices import terms_of
from megatron.config.per_layer import problem_of
from megatron.config.rules.relation import Found, relation

for _key in ("pos_emb", "sliding_window_width"):

    @relation(_key, "num_layers")
    def _per_layer(value: Any, num_layers: int, key: str = _key) -> Found | None:
        if problem := problem_of(value, num_layers):
            return key, problem


@relation("reset_position_ids", "reset_attention_mask")
def _restarted_positions(positions: bool, documents: bool) -> Found | None:
    if positions and not documents:
        text = "true without reset_attention_mask: tokens of two documents that see each other "
        text += "would have wrong distances"
        return "reset_position_ids", f"{text}; write reset_attention_mask: true too"


@relation("random_positions", "seq_length", "reset_attention_mask")
def _random_positions(count: int, length: int, documents: bool) -> Found | None:
    if count and documents:
        text = "reset_attention_mask: true has positions of its own; write only one of them"
        return "random_positions", text
    if 0 < count < length:
        text = f"{count} positions are too few for seq_length {length}"
        return "random_positions", f"{text}; write e.g. {4 * length}"


@relation("pos_emb", "head_dim", "rotary_pct")
def _rotary(pos_emb: Any, size: int, pct: float) -> Found | None:
    if "rotary" not in terms_of(pos_emb):
        return None
    turned = int(size * pct)
    if turned == 0 or turned % 2:
        text = f"rotary rotates pairs of dimensions, but int(head size {size} x rotary_pct {pct})"
        text += f" = {turned}; choose head_dim and rotary_pct so that this number is even"
        return "rotary_pct" if pct < 1 else "pos_emb", f"{text} and above 0"


@relation("rope_scaling", "pos_emb")
def _scaling(scaling: Any, pos_emb: Any) -> Found | None:
    if scaling and "rotary" not in terms_of(pos_emb):
        return "rope_scaling", "scales the angles of rotary, which is not in pos_emb; leave it out"


@relation("rope_scaling", "pos_emb_options")
def _scaled_twice(scaling: Any, options: Any) -> Found | None:
    given = options.get("rotary", options)
    if scaling and isinstance(given, Mapping) and "rope_type" in given:
        text = "scales the angles of rotary, and so does pos_emb_options; leave one of them out"
        return "rope_scaling", text


@relation("pos_emb", "hidden_size")
def _sinusoidal(pos_emb: Any, hidden: int) -> Found | None:
    if "sinusoidal" in terms_of(pos_emb) and hidden % 2:
        text = f"{hidden} is odd, but sinusoidal needs pairs of dimensions"
        return "hidden_size", f"{text}; write {hidden + 1}"


@relation()
def _learned(
    pos_emb: Any, max_position_embeddings: int, opt_pos_emb_offset: int, random_positions: int,
    seq_length: int, seq_length_val: int, eval_lengths: tuple[int, ...],
) -> Found | None:  # fmt: skip
    asked = {"random_positions": random_positions, "seq_length": seq_length}
    asked |= {"seq_length_val": seq_length_val, "eval_lengths": max(eval_lengths, default=0)}
    rows, offset = max_position_embeddings, opt_pos_emb_offset
    name = next((name for name, length in asked.items() if length + offset > rows), None)
    if "learned" in terms_of(pos_emb) and name is not None:
        shifted = f" + opt_pos_emb_offset {offset}" if offset else ""
        text = f"{asked[name]}{shifted} is above max_position_embeddings {rows}, where learned "
        text += f"positions end; write max_position_embeddings: {max(asked.values()) + offset}"
        trained = "; for a trained model, give shorter --lengths" * (name == "eval_lengths")
        return name, f"{text}, or another pos_emb{trained}"


@relation("pos_emb", "rpe_num_buckets", "rpe_max_distance")
def _rpe(pos_emb: Any, buckets: int, distance: int) -> Found | None:
    if "rpe" not in terms_of(pos_emb):
        return None
    if buckets < 2:
        return "rpe_num_buckets", f"{buckets} is too few: rpe needs at least 2; write e.g. 32"
    if distance <= buckets // 2:
        text = f"{distance} with rpe_num_buckets {buckets}: half of the buckets hold one distance "
        text += f"each, so rpe_max_distance must be above {buckets // 2}"
        return "rpe_max_distance", f"{text}; write e.g. 128 with 32 buckets"


@relation("theta_init", "num_attention_heads")
def _one_per_head(init: Mapping[str, Any], heads: int) -> Found | None:
    for name, values in init.items():
        if isinstance(values, tuple) and len(values) != heads:
            text = f"{len(values)} numbers for {name}, but num_attention_heads is {heads}"
            return "theta_init", f"{text}; write one number for all heads, or {heads} numbers"


@relation("theta_frozen", "weight_decay_positional")
def _decay(frozen: bool | tuple[str, ...], decays: bool) -> Found | None:
    if decays and isinstance(frozen, tuple) and frozen:
        text = f"{list(frozen)} with weight_decay_positional: it would decay all of theta's"
        return "theta_frozen", f"{text} parameters; write true, or weight_decay_positional: false"
