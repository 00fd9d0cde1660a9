"""The GPT model. It needs torch alone: no engine, no config object, no Triton."""

from megatron.model.gpt import GPT
from megatron.model.shape import BlockShape, GPTShape

__all__ = ["GPT", "BlockShape", "GPTShape"]
