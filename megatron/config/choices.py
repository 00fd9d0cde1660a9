"""Fields that are one of a few names, with their synonyms and the names refused for now.

Names are accepted in any case, as GPT-NeoX accepts them, and kept in the spelling of the Literal.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from megatron.config.fields import one_of

_NOT_BUILT = "not built yet"


def _not_built(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, _NOT_BUILT)


_Norm = Literal["layernorm", "rmsnorm", "scalenorm"]
_TE = "Transformer Engine is not used"
Norm = Annotated[
    _Norm,
    BeforeValidator(
        one_of(
            _Norm,
            refused={
                **_not_built("non_parametric_layernorm"),
                "te_layernorm": _TE,
                "te_rmsnorm": _TE,
            },
        )
    ),
]

_Activation = Literal["gelu", "relu", "softsign", "swish", "mish", "geglu"]
Activation = Annotated[
    _Activation,
    BeforeValidator(
        one_of(
            _Activation,
            aliases={"silu": "swish"},  # the same function, x * sigmoid(x)
            refused=_not_built("swiglu", "reglu", "bilinear", "glu"),
        )
    ),
]

_Backend = Literal["auto", "fused", "blocked", "flex", "sdpa", "eager"]
AttentionBackend = Annotated[_Backend, BeforeValidator(one_of(_Backend))]

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
Init = Annotated[
    _Init, BeforeValidator(one_of(_Init, refused=_not_built("single_residual_scaled_normal")))
]

_Side = Literal["row", "column"]
Side = Annotated[_Side, BeforeValidator(one_of(_Side))]

_DataImpl = Literal["mmap"]
DataImpl = Annotated[
    _DataImpl,
    BeforeValidator(
        one_of(
            _DataImpl,
            aliases={"infer": "mmap"},
            refused=dict.fromkeys(("cached", "lazy"), "only the mmap format is read"),
        )
    ),
]

_Tokenizer = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer", "CharLevelTokenizer", "ByteLevelTokenizer"
]
Tokenizer = Annotated[
    _Tokenizer,
    BeforeValidator(
        one_of(
            _Tokenizer,
            refused=_not_built("HFGPT2Tokenizer", "TiktokenTokenizer"),
        )
    ),
]

_Optimizer = Literal["adam", "sgd"]
_OTHERS = ("onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "lion", "lamb")
OptimizerType = Annotated[
    _Optimizer,
    BeforeValidator(
        # Both names mean decoupled decay: the published Adam is apex's, whose default that is.
        one_of(_Optimizer, aliases={"adamw": "adam"}, refused=_not_built(*_OTHERS))
    ),
]

_Decay = Literal["constant", "linear", "cosine", "exponential"]
DecayStyle = Annotated[_Decay, BeforeValidator(one_of(_Decay))]

_Precision = Literal["fp32", "bf16", "fp16"]
_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Precision = Annotated[_Precision, BeforeValidator(one_of(_Precision, aliases=_LONG_NAMES))]

_Distributed = Literal["nccl", "gloo"]
DistributedBackend = Annotated[_Distributed, BeforeValidator(one_of(_Distributed))]

_Split = Literal["valid", "test"]
EvalSplit = Annotated[_Split, BeforeValidator(one_of(_Split))]

_WandbMode = Literal["online", "offline", "disabled"]
WandbMode = Annotated[_WandbMode, BeforeValidator(one_of(_WandbMode))]
