"""Every key that the configuration keeps is read by some code, or says that it has no effect."""

import re

from megatron.config.neox.no_effect import KEPT_NO_EFFECT
from megatron.config.schema import Config
from tests.helpers.paths import ROOT

READ_BY_CONFIG = {
    "world_size": "an input of the batch arithmetic",
    "data_parallel_size": "a result of the batch arithmetic, printed by --check",
    "num_kv_heads": "another value than num_attention_heads is refused",
    "apply_query_key_layer_scaling": "true is refused",
    "data_impl": "another value than mmap is refused",
    "pipe_parallel_size": "another value than 0 and 1 is refused",
    "output_layer_parallelism": "concerns model_parallel_size above 1, which is refused",
}


def fields():
    for section, info in Config.model_fields.items():
        for name in getattr(info.annotation, "model_fields", {}):
            yield section, name


def test_every_field_is_used_or_noted():
    code = "\n".join(
        path.read_text()
        for path in [*(ROOT / "megatron" / "engine").rglob("*.py"), *ROOT.glob("*.py")]
    )
    unused = [
        f"{section}.{name}"
        for section, name in fields()
        if not re.search(rf"[.\"\']{name}\b", code)
        and name not in KEPT_NO_EFFECT
        and name not in READ_BY_CONFIG
    ]
    assert not unused, "accepted, but nothing reads them"
