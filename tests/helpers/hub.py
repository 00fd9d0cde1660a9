"""Make tiny models with random weights, of transformers and as exports, and train them there."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.overrides import TorchFunctionMode

from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.hub.modeling_kerple import KerpleConfig, KerpleForCausalLM
from megatron.model import GPT

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
}
KINDS = {
    "gpt_neox": "GPTNeoX",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "stablelm": "StableLm",
    "phi": "Phi",
    "gptj": "GPTJ",
    "gpt2": "GPT2",
    "opt": "OPT",
    "qwen2": "Qwen2",
    "mistral": "Mistral",
}
"""The model type -> how the names of its classes begin. Only the classes in use are imported."""
_NAMES = {kind: {"intermediate_size": "n_inner"} for kind in ("gptj", "gpt2")}
_NAMES["opt"] = {"intermediate_size": "ffn_dim"}


class Wide(TorchFunctionMode):
    """Compute in float64 what transformers' code computes in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: self._wide(v) for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(self._wide, args), **kwargs)

    @staticmethod
    def _wide(value):
        return torch.float64 if value is torch.float32 else value


def hub_model(kind: str, **changes):
    """Return a model of transformers with random weights, in eval mode and float32."""
    config = getattr(transformers, f"{KINDS[kind]}Config")
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    model = getattr(transformers, f"{KINDS[kind]}{head}")
    torch.manual_seed(3)
    sizes = {_NAMES.get(kind, {}).get(name, name): size for name, size in SIZES.items()}
    made = model(config(**(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # biases start as 0, norms as 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def write_tokenizer(folder: Path, end: str = "<|endoftext|>", *, normalised: bool = False) -> None:
    """Write a tokenizer.json that encodes each byte as one token.

    Args:
        normalised: Whether texts are normalised, as transformers does for every Qwen2.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate([*letters, end])}, []))
    if normalised:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def imported_model(run: Path, *overrides: str) -> GPT:
    """Return the model of an imported run folder, in float64, loaded as our commands load it."""
    config = load_config([run / "config.yml"], overrides)
    rows = config.model.make_vocab_size_divisible_by
    model = GPT(plan_of(config, rows, device_type="cpu", training=False)).double().eval()
    saved = newest(run)
    assert saved is not None
    load_weights(model, saved)
    return model


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
    from transformers import Trainer, TrainingArguments  # seconds for tests that need neither

    data = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 12)]
    settings = {"max_steps": 50, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 2, "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(folder), **(settings | options))
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer
