"""Define the types of config fields that accept one of a few names, such as `adam` or `bf16`.

Some names have aliases. Some names that GPT-NeoX accepts are refused with a reason. As in GPT-NeoX,
users may write names in upper or lower case. The resolved config has the spelling of this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from megatron.config.fields import one_of, whole_number
from megatron.config.per_layer import per_layer, values_of
from megatron.embedding_names import OTHERS, POSITIONAL_ALIASES


def choice(names: str, **others: Mapping[str, str]) -> BeforeValidator:
    """Return a pydantic validator that accepts one of several names.

    Args:
        names: The accepted names, separated by spaces.
        others: Up to two dicts. `aliases` maps each alias to its accepted name. `refused` maps each
            refused name to the reason.
    """
    # `others` has up to two dicts. `aliases` maps each alias to the accepted name that replaces it.
    # `refused` maps each refused name to the reason for the refusal.
    return BeforeValidator(one_of(names.split(), **others))


def _not_built(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "not built yet")


# Each positional embedding has the name of its file.
_FILES = (Path(__file__).resolve().parents[1] / "positional").glob("[!_]*.py")
POSITIONAL_NAMES = tuple(sorted({path.stem for path in _FILES} - OTHERS))
_DAPE = "it mixes the scores of all heads in a network, so that no head can be computed alone"
_DAPE_KERNELS = ("alibi", "fire", "kerple", "rope", "xl_bias")
_DAPE_FORMS = ("c", "capev2", "dapev1", "dapev2")
_SELECTIVE = "it lowers each score by the scores of earlier queries"
_STICKS = "it replaces the softmax by a product over the keys in between"
# Maps each refused positional method to the reason why no attention backend computes it.
_BY_CONTENT = {
    "cope": "its positions are sums of gates over a row's scores, not distances",
    "xl_bias": "its bias depends on the content of the query",
    "pope": "its scores are products of vectors of twice the head size, with learned phases",
    "path": "it transforms keys by a matrix of every token between key and query",
    "wall": "it decays each channel of a score by gates of the tokens in between",
    **dict.fromkeys(("stick_breaking", "stickbreaking"), _STICKS),
    **dict.fromkeys(("selective", "selective_attention"), _SELECTIVE),
    **dict.fromkeys(("dape", "dapev2", "capev2", "nope_c", "nope_c_ffn"), _DAPE),
    **dict.fromkeys((f"{kernel}_{c}" for kernel in _DAPE_KERNELS for c in _DAPE_FORMS), _DAPE),
}
_positional_term = one_of(POSITIONAL_NAMES, aliases=POSITIONAL_ALIASES, refused=_BY_CONTENT)


def positional_name(value: Any) -> str:
    """Check and return the name of a positional embedding or of a combination of embeddings.

    Aliases are replaced in the result.

    Raises:
        ValueError: A name is unknown, is refused, or occurs twice.
    """
    # Names in a combination are joined by ` + `, as in `rotary + kerple_log`.
    if not isinstance(value, str):
        return _positional_term(value)
    terms = [_positional_term(term.strip()) for term in value.split("+")]
    for term in terms:
        if terms.count(term) > 1:
            raise ValueError(f"{term} occurs twice in {value!r}; write it once")
    return " + ".join(terms)


def terms_of(pos_emb: Any) -> set[str]:
    """Return the names of all positional embeddings (the terms) in `pos_emb`.

    Args:
        pos_emb: A checked value of the config key `pos_emb`. It is a name, a combination such as
            `rotary + kerple_log`, or a tuple with the values of each layer.
    """
    # See `config.per_layer`.
    return {term for name in values_of(pos_emb) for term in name.split(" + ")}


PositionalName = Annotated[Any, BeforeValidator(per_layer(positional_name))]
"""The name of a positional embedding, or a tuple with names per layer (see `config.per_layer`)."""

_distance = whole_number(0, write="e.g. 512, or none for any distance")


def _width(value: Any) -> int | None:
    return None if value is None or value == "none" else _distance(value)


Width = Annotated[Any, BeforeValidator(per_layer(_width))]
"""A distance in tokens, None for no limit, or a tuple of such values (see `config.per_layer`)."""

_TE = dict.fromkeys(("te_layernorm", "te_rmsnorm"), "Transformer Engine is not used")
Norm = Annotated[
    str, choice("layernorm rmsnorm scalenorm", refused=_not_built("non_parametric_layernorm") | _TE)
]

Activation = Annotated[
    str,
    choice(
        "gelu relu softsign swish mish geglu swiglu reglu glu bilinear",
        aliases={"silu": "swish"},  # the same function, x * sigmoid(x)
    ),
]

Init = Annotated[
    str,
    choice(
        "normal scaled_normal orthogonal scaled_orthogonal xavier_uniform xavier_normal wang_init "
        "small_init",
        refused=_not_built("single_residual_scaled_normal"),
    ),
]

TOKENIZERS = "GPT2BPETokenizer HFTokenizer SPMTokenizer CharLevelTokenizer ByteLevelTokenizer"
"""The tokenizers of text, as one text."""
TOKENIZERS_NOT_BUILT = ("HFGPT2Tokenizer", "TiktokenTokenizer")
Tokenizer = Annotated[
    str, choice(f"{TOKENIZERS} TaskTokenizer", refused=_not_built(*TOKENIZERS_NOT_BUILT))
]

_OTHERS = ("onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "lion", "lamb")
OptimizerType = Annotated[
    str,
    # Both names select decoupled weight decay, because the published code uses apex's Adam, whose
    # default is decoupled weight decay.
    choice("adam fusedadam sgd muon", aliases={"adamw": "adam"}, refused=_not_built(*_OTHERS)),
]

LONG_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Precision = Annotated[str, choice("fp32 bf16 fp16", aliases=LONG_PRECISIONS)]

MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes of `torch.compile` that use CUDA graphs."""
