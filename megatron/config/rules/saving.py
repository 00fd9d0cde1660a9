"""Refuse keys about checkpoints that contradict each other."""

from __future__ import annotations

from megatron.config.rules.relation import Found, relation


@relation("finetune", "save", "load")
def _finetune(finetune: bool, save: str, load: str) -> Found | None:
    if finetune and save.rstrip("/") == load.rstrip("/"):
        text = f"true with save and load both {load}: the new run would overwrite the checkpoints "
        text += "that it starts from"
        return "finetune", f"{text}; add -o save={save.rstrip('/')}-tuned"
