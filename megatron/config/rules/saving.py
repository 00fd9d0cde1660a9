"""Refuse config keys about checkpoints that contradict each other."""

from megatron.config.rules.relation import Found, relation


@relation("finetune", "retrofit_init", "retrofit_anneal")
def _retrofit(finetune: bool, init: str, anneal: int) -> Found | None:
    if not finetune and (init != "gentle" or anneal):
        key = "retrofit_anneal" if anneal else "retrofit_init"
        return key, "changes positions of loaded weights, which needs finetune: true; write it too"


@relation("retrofit_anneal", "torch_compile")
def _fading(anneal: int, compiles: bool) -> Found | None:
    if anneal and compiles:
        text = f"{anneal} with torch_compile: each step has other angles and would compile again"
        return "retrofit_anneal", f"{text}; write torch_compile: false"


@relation("retrofit_anneal", "train_iters")
def _faded(anneal: int, steps: int) -> Found | None:
    if anneal and anneal >= steps:
        text = f"{anneal} with train_iters {steps}: the last model would still have a part of its "
        text += "old positions, which evaluation and exports leave out"
        return "retrofit_anneal", f"{text}; write a number below train_iters"


@relation("finetune", "save", "load")
def _finetune(finetune: bool, save: str, load: str) -> Found | None:
    if finetune and save.rstrip("/") == load.rstrip("/"):
        text = f"true with save and load both {load}: the new run would overwrite the checkpoints "
        text += "that it starts from"
        return "finetune", f"{text}; add -o save={save.rstrip('/')}-tuned"
