"""Fields that are one of a few names, with their synonyms and the names that are refused.

Names are accepted in any case, as GPT-NeoX accepts them, and kept in the spelling given here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from megatron.config.fields import one_of


def _choice(names: Any, **others: Any) -> BeforeValidator:
    return BeforeValidator(one_of(get_args(names), **others))


def _not_built(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "not built yet")


def _positional_names() -> list[str]:
    """Every `megatron/positional/NAME.py` that is an embedding: the file's name is the registry."""
    folder = Path(__file__).resolve().parents[1] / "positional"
    names = {path.stem for path in folder.glob("[!_]*.py")}
    return sorted(names - {"base"})


POSITIONAL_NAMES = tuple(_positional_names())
PUBLISHED_POSITIONAL_NAMES = {
    "kerple_power_ap_": "kerple_power",
    "kerple_power__ap": "kerple_power_mul",
    "kerple_power_ap_ap": "kerple_power_add_mul",
}
"""Names that the published KERPLE code uses -> ours, where they differ."""
positional_name = one_of(POSITIONAL_NAMES, aliases=PUBLISHED_POSITIONAL_NAMES)
PositionalName = Annotated[str, BeforeValidator(positional_name)]

_Norm = Literal["layernorm", "rmsnorm", "scalenorm"]
_TE = dict.fromkeys(("te_layernorm", "te_rmsnorm"), "Transformer Engine is not used")
Norm = Annotated[_Norm, _choice(_Norm, refused=_not_built("non_parametric_layernorm") | _TE)]

_Activation = Literal["gelu", "relu", "softsign", "swish", "mish", "geglu"]
Activation = Annotated[
    _Activation,
    _choice(
        _Activation,
        aliases={"silu": "swish"},  # the same function, x * sigmoid(x)
        refused=_not_built("swiglu", "reglu", "bilinear", "glu"),
    ),
]

_Backend = Literal["auto", "fused", "blocked", "flex", "sdpa", "eager"]
AttentionBackend = Annotated[_Backend, _choice(_Backend)]

_Init = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
]
Init = Annotated[_Init, _choice(_Init, refused=_not_built("single_residual_scaled_normal"))]

_Side = Literal["row", "column"]
Side = Annotated[_Side, _choice(_Side)]

_Tokenizer = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer", "CharLevelTokenizer", "ByteLevelTokenizer"
]
Tokenizer = Annotated[
    _Tokenizer, _choice(_Tokenizer, refused=_not_built("HFGPT2Tokenizer", "TiktokenTokenizer"))
]

_Optimizer = Literal["adam", "sgd"]
_OTHERS = ("onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "lion", "lamb")
OptimizerType = Annotated[
    _Optimizer,
    # Both names mean decoupled decay: the published Adam is apex's, which decouples by default.
    _choice(_Optimizer, aliases={"adamw": "adam"}, refused=_not_built(*_OTHERS)),
]

_Decay = Literal["constant", "linear", "cosine", "exponential"]
DecayStyle = Annotated[_Decay, _choice(_Decay)]

_Precision = Literal["fp32", "bf16", "fp16"]
_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Precision = Annotated[_Precision, _choice(_Precision, aliases=_LONG_NAMES)]

_Distributed = Literal["nccl", "gloo"]
DistributedBackend = Annotated[_Distributed, _choice(_Distributed)]

_Split = Literal["valid", "test"]
EvalSplit = Annotated[_Split, _choice(_Split)]

_WandbMode = Literal["online", "offline", "disabled"]
WandbMode = Annotated[_WandbMode, _choice(_WandbMode)]
