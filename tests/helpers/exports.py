"""Make exported models with random weights, and train them as transformers' users do."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

from megatron.hub.modeling_kerple import KerpleConfig, KerpleForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "rotary_ndims": 4, "tie_word_embeddings": False}
EMBEDDINGS = {
    "kerple_log": {},
    "rotary": {},
    "rotary + kerple_log + forget_gate": {"windows": [None, 9]},
    "fire": {},
    "kerple_power_mul": {},
    "log_n + sink + kerple_power": {"qk_norm": True},
    "learned": {},
    "kerple_log + rpe": {"document_end": 3, "restart_positions": True},
}
"""The embedding, and other keys of the config."""


def model_of(pos_emb="kerple_log", kind=KerpleForCausalLM, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    config = KerpleConfig(pos_emb=pos_emb, max_position_embeddings=400, **(SHAPE | changes))
    model = kind(config).to(dtype).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "theta" not in name:
                each.add_(torch.randn_like(each), alpha=0.2)
    return model


def tokens(*shape, seed=2):
    return torch.randint(4, 64, shape, generator=torch.Generator().manual_seed(seed))


def close(found, wanted, atol=1e-10):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def trained(model, folder, **options):
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 12)]
    settings = {"max_steps": 50, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 2, "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(folder), **(settings | options))
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer
