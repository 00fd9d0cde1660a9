"""Define the model as a class of `transformers` that generates with a KV cache.

An export consists of the weights and one Python file, which `bundle` writes. The exported file
first contains the modules that this module imports, then the positional embeddings of the model,
and at the end this module. Therefore these modules import only torch, transformers and each other.

Texts of a batch may be padded. A token's column is its index in the padded text. Its position is
counted from the first token of the text that is not padding. Tokens do not see the padding.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, N
columns of theta, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron.attention.call import document_starts
from megatron.hub.layers import Block, Columns, KerpleConfig, norm_of
from megatron.positional import load
from megatron.positional.base import PositionalEmbedding
from megatron.positional.combination import PerLayer


def positional_of(config: KerpleConfig) -> PositionalEmbedding:
    """Build the positional embedding of the model."""
    several = not isinstance(config.pos_emb, str)
    names = list(config.pos_emb) if several else [config.pos_emb] * config.num_hidden_layers
    options = config.pos_emb_options or {}
    loaded = {name: load(name, **options.get(name, {})) for name in names}
    pos = loaded[names[0]]
    if several or config.theta_per_layer:
        pos = PerLayer([loaded[name] for name in names], own_theta=config.theta_per_layer)
    return pos if config.distance_scale == 1.0 else pos.scaled(config.distance_scale)


class Embedding(nn.Module):
    """The token embedding, and the position table if the positional embedding is `learned`."""

    def __init__(self, config: KerpleConfig, pos: PositionalEmbedding):
        super().__init__()
        self.pos, self.offset = pos, config.position_offset
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings: nn.Embedding | None = None
        if any(term.kind == "input" and term.learnable for term in pos.terms):
            rows = config.max_position_embeddings
            self.position_embeddings = nn.Embedding(rows, config.hidden_size)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Add the vectors of the positions to the vectors of the tokens."""
        if self.position_embeddings is not None:
            rows = self.position_embeddings.num_embeddings - self.offset
            if int(positions_BT.max()) >= rows:
                raise ValueError(f"the model has vectors for {rows} positions, so no more tokens")
            return x_BTD + self.position_embeddings(positions_BT + self.offset)
        if self.pos.has("input"):
            table_BTD = self.pos.table(positions_BT, x_BTD.shape[-1], x_BTD.dtype)
            return x_BTD + table_BTD.to(x_BTD.dtype)
        return x_BTD


class KerpleForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of this project as a class of `transformers`.

    The buffer `theta` [heads, parameters] holds the parameters of the positional embedding.
    Training in transformers does not change `theta`.
    """

    config_class = KerpleConfig
    _no_split_modules = ["Block"]

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        pos = positional_of(config)
        self.embedding = Embedding(config, pos)
        parts = [pos.of_layer(index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Block(config, i, *part) for i, part in enumerate(parts))
        self.final_norm = norm_of(config, config.hidden_size)
        self.output: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
        self.theta: Tensor | None
        self.register_buffer("theta", None)
        if pos.parameters:
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.theta = pos.initial_theta(config.num_attention_heads).to(wide)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.output

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.output = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the new tokens, and their loss if there are labels.

        Args:
            input_ids: The new tokens, int64 [B, T].
            attention_mask: 0 where a token is padding, otherwise 1, [B, S]. None means no padding.
            past_key_values: The cache with the tokens before the new ones.
            inputs_embeds: The vectors of the new tokens, [B, T, D], in place of `input_ids`.
            labels: The new tokens, or -100 for tokens without a loss, [B, T].
            use_cache: Whether to return a cache. None takes the config's value.
            logits_to_keep: The number of last tokens whose logits are returned. 0 means all tokens.
        """
        x_BTD = inputs_embeds
        if x_BTD is None:
            x_BTD = self.embedding.word_embeddings(input_ids)
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        at = self._columns(x_BTD, input_ids, attention_mask, past_key_values)
        x_BTD = self.embedding(x_BTD, at.positions_BT)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        theta_HN = x_BTD.new_zeros(self.config.num_attention_heads, 0)
        if self.theta is not None:
            theta_HN = self.theta.to(x_BTD.device)
        for layer in self.layers:
            x_BTD = layer(x_BTD, theta_HN.to(wide), at, past_key_values)
        x_BTD = self.final_norm(x_BTD)[:, -logits_to_keep:]
        matrix = self.embedding.word_embeddings if self.output is None else self.output
        logits_BTV = F.linear(x_BTD, matrix.weight, getattr(matrix, "bias", None))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past_key_values)

    def _columns(
        self,
        x_BTD: Tensor,
        input_ids: Tensor | None,
        mask_BS: Tensor | None,
        cache: DynamicCache | None,
    ) -> Columns:
        """Compute what all layers need to know of the batch: positions, padding and documents.

        Args:
            x_BTD: The vectors of the new tokens.
            input_ids: The new tokens; needed only if tokens attend only to their own document.
            mask_BS: The attention mask: 0 where a token is padding, otherwise 1.
            cache: The cache with the tokens before the new ones.
        """
        cached = cache.get_seq_length() if cache is not None else 0
        total, device = cached + x_BTD.shape[1], x_BTD.device
        column_S = torch.arange(total, device=device)
        new_T = column_S[cached:]
        first_BT = column_S.new_zeros(len(x_BTD), len(new_T))
        padding_BTS = first_BT.new_zeros(1, 1, 1, dtype=torch.bool)
        if mask_BS is not None:
            if mask_BS.shape != (len(x_BTD), total):
                shape = [len(x_BTD), total]
                raise ValueError(
                    f"attention_mask must be {shape}, not {list(mask_BS.shape)}; only the dynamic "
                    "cache is supported"
                )
            seen_BS = mask_BS.to(device).bool()
            padding_BTS = ~seen_BS[:, None] & (new_T[:, None] != column_S)
            first_BT = first_BT + (seen_BS.cumsum(1) == 0).sum(1, keepdim=True)
        starts_BS = ended_BT = None
        if (end := self.config.document_end) is not None:
            if input_ids is None:
                raise ValueError("this model separates documents, so it needs input_ids")
            ended_BT = ended_BS = input_ids == end
            if cache is not None and cached:  # `Attention` keeps them as the keys' last numbers
                keys_BKSE: Any = getattr(cache.layers[0], "keys")  # noqa: B009
                ended_BS = torch.cat((keys_BKSE[:, 0, :, -1].to(device) > 0, ended_BT), dim=1)
            starts_BS = document_starts(ended_BS)
            if self.config.restart_positions:
                first_BT = first_BT.maximum(starts_BS[:, cached:])
        positions_BT = (new_T - first_BT).clamp(min=0)
        return Columns(cached, positions_BT, padding_BTS, starts_BS, ended_BT)
