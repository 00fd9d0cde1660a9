"""Define the GPT model. It depends on torch, but not on the engine, a config object or Triton."""

from megatron.model.documents import Documents
from megatron.model.gpt import GPT
from megatron.model.shape import BlockShape, GPTShape, LayerAttention, Plan

__all__ = ["GPT", "BlockShape", "Documents", "GPTShape", "LayerAttention", "Plan"]
