"""Define the GPT model. This package does not import the engine, the config or Triton."""

from megatron.model.documents import Documents
from megatron.model.gpt import GPT
from megatron.model.shape import BlockShape, GPTShape, LayerAttention, Plan

__all__ = ["GPT", "BlockShape", "Documents", "GPTShape", "LayerAttention", "Plan"]
