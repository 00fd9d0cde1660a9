"""Small models that are built on one rank, or sharded over tensor-parallel ranks."""

import torch

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.groups import ALONE
from megatron.parallel.sharding import local_slice
from megatron.positional import load

BASE = {"pos": "kerple_log", "tied": True, "row": False, "gpt_j": False, "activation": "gelu"}
LLAMA = {
    "hidden_size": 32,
    "num_heads": 8,
    "num_kv_heads": 4,  # for two tensor-parallel and two context-parallel ranks
    "activation": "swiglu",
    "inner_size": 20,
    "attention_bias": False,
    "mlp_bias": False,
    "norm": "rmsnorm",
    "fused_norm": True,
}
VARIANTS = {
    "plain": {},
    "llama": {"pos": "rotary", "tied": False, "block": LLAMA},
    "llama, two key heads": {"pos": "rotary", "block": LLAMA | {"num_kv_heads": 2}},
    "llama, q and k normed": {"pos": "rotary", "block": LLAMA | {"qk_norm": True}},
    "shared norms of q and k": {
        "pos": "rotary",
        "block": LLAMA | {"qk_norm": True, "qk_norm_kind": "shared", "head_dim": 6},
    },
    "joined norms of q and k": {
        "block": LLAMA | {"qk_norm": True, "qk_norm_kind": "joined", "output_norms": True}
    },
    "gpt_j_tied": {"gpt_j": True, "block": {"gpt_j_tied": True, "qkv_bias": True}},
    "output bias": {"tied": False, "output_bias": True},
    "output bias, cut by inputs": {"tied": False, "row": True, "output_bias": True},
    "layernorm of q and k": {"block": {"qk_norm": True}},
    "output gate": {"block": {"output_gate": True}},
    "scalenorm of q and k": {"block": {"qk_norm": True, "norm": "scalenorm"}},
    "kerple_power": {"pos": "kerple_power"},
    "rpe": {"pos": "rpe"},
    "alibi": {"pos": "alibi"},
    "rotary": {"pos": "rotary"},
    "fire": {"pos": "kerple_log + fire"},
    "learned": {"pos": "learned", "rows": 13},  # as many as the longest sequence has tokens
    "untied": {"tied": False},
    "output cut by inputs": {"tied": False, "row": True},
    "gpt_j_residual": {"gpt_j": True},
    "geglu": {"activation": "geglu"},
    "scalenorm": {"norm": "scalenorm"},
    "losses in pieces": {"z_loss": 0.2},
    "losses in pieces, output cut by inputs": {"z_loss": 0.2, "tied": False, "row": True},
}


def build(tp, dropout=0.0, cp=ALONE, **changes):
    """Build a float64 model with nonzero biases, so that adding one twice would be noticed."""
    v = BASE | changes
    pos = load(v["pos"])
    values = {"hidden_size": 24, "num_heads": 4, "gpt_j_residual": v["gpt_j"]}
    values |= {"activation": v["activation"], "norm": v.get("norm", "layernorm")}
    values |= {"attention_dropout": dropout, "hidden_dropout": dropout} | v.get("block", {})
    block = BlockShape(**values)
    rows = v.get("rows", 16)
    output = {"row_parallel_output": v["row"], "output_bias": v.get("output_bias", False)}
    shape = GPTShape(2, 32, block, rows, tie_weights=v["tied"], **output)
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float64)
    z_loss = v.get("z_loss", 0.0)
    model = GPT(Plan(shape, pos, attend, 1, tp=tp or ALONE, cp=cp, z_loss=z_loss)).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias") or "attention" in name and "norm" in name:
                whole = torch.linspace(-0.3, 0.4, param.numel() * getattr(param, "shard_count", 1))
                param.copy_(local_slice(param, whole))
    return model
