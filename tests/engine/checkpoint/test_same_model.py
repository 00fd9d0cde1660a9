"""Test that a resumed run has the block that the checkpoint was trained with."""

import pytest

from megatron.config import load_config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.engine.model_shape import identity_of, shape_of
from tests.helpers.jobs import write_config
from tests.helpers.paths import FIXTURES

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}


def identity(folder, **changes):
    config = load_config([write_config(folder / "c.yml", "text", train_batch_size=4, **changes)])
    tokenizer = build_tokenizer("ByteLevelTokenizer", None, None)
    return identity_of(config, shape_of(config, tokenizer.vocab_size), tokenizer)


def test_the_identity_tells_functions_apart(tmp_path):
    rotary = {"pos_emb": "rotary", "norm": "rmsnorm"}
    plain = identity(tmp_path, **rotary)
    for change in (
        {"rmsnorm_fusion": True},  # epsilon inside the root
        {"rope_scaling": YARN},
        {"num_kv_heads": 2},
        {"use_qk_layernorm": True},
        {"attention_output_gate": True},
        {"use_bias_in_mlp": False},
        {"intermediate_size": 100},
    ):
        assert identity(tmp_path, **rotary | change) != plain, change
    same = {"num_kv_heads": 4, "intermediate_size": 128, "layernorm_fusion": True}
    assert identity(tmp_path, **rotary | same) == plain
    assert identity(tmp_path, layernorm_fusion=True) == identity(tmp_path)


@pytest.mark.parametrize(
    "change", [{"qk_norm": True}, {"output_gate": True}, {"inner_size": 20}, {"rope_scaling": YARN}]
)
def test_a_checkpoint_of_an_earlier_version_has_the_default_block(change):
    saved = newest(FIXTURES / "checkpoint" / "run")
    assert not change.keys() & saved.record.model.keys()
    saved.require_same(RunDescription(model=saved.record.model | {"qk_norm": False}), "model")
    with pytest.raises(CheckpointError, match=f"{next(iter(change))}: .* in the checkpoint, "):
        saved.require_same(RunDescription(model=saved.record.model | change), "model")
    saved.require_same(RunDescription(model=change), "model", free=tuple(change))
