"""The GPT model. Needs torch alone: no engine, no config object, no Triton."""

from megatron.model.block import BlockShape
from megatron.model.gpt import GPT, GPTShape

__all__ = ["GPT", "BlockShape", "GPTShape"]
