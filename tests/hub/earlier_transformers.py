"""Check an export with transformers 4, in an environment without this project.

    python -m tests.hub.earlier_transformers write DIR    here: an export, and its logits
    python tests/hub/earlier_transformers.py check DIR    there: load, logits, generate, Trainer

`.ci/transformers4` runs both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def write(folder: Path) -> None:
    """Write the folder `export`, and `wanted.pt` with token ids and this project's logits."""
    from megatron.hub.export import export
    from tests.hub.test_export_hf import run_of

    run = run_of(pos_emb="rotary + kerple_log + forget_gate", num_layers=2, num_kv_heads=2)
    run.model.float()
    target = folder / "export"
    target.mkdir()
    export(run, target)
    ids = torch.randint(1, 256, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.save((ids, run.model(ids)), folder / "wanted.pt")


def check(folder: Path) -> None:
    """Load the export, compare its logits, continue padded texts, train it and load it again."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    def load(name: str):
        return AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)

    model, tokenizer = load("export"), AutoTokenizer.from_pretrained(folder / "export")
    ids, wanted = torch.load(folder / "wanted.pt")
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            difference = float((model(ids).logits - wanted).abs().max())
        assert difference < 1e-3, (implementation, difference)
    texts = ["import os, ", "def"]
    options = {"max_new_tokens": 20, "do_sample": False}
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    made = tokenizer.batch_decode(model.generate(**batch, **options), skip_special_tokens=True)
    for text, found in zip(texts, made, strict=True):
        alone = model.generate(**tokenizer([text], return_tensors="pt"), **options)
        assert found == tokenizer.decode(alone[0], skip_special_tokens=True), (found, alone)
    theta = model.model.position_bias.theta
    before = theta.detach().clone()
    settings = TrainingArguments(
        str(folder / "trained"), max_steps=20, learning_rate=1.0, weight_decay=0.5, use_cpu=True,
        gradient_checkpointing=True, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, settings, train_dataset=data)
    trainer.train()
    assert not any("theta" in name for name in trainer.get_decay_parameter_names(model))
    assert not torch.equal(theta, before) and theta.min() >= 0.01, theta
    model.save_pretrained(folder / "saved")
    assert torch.equal(load("saved").model.position_bias.theta, theta)
    print(f"transformers {transformers.__version__}: load, logits, generate and Trainer work")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
