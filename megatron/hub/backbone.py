"""Define the model without a head, and the base class of the models with a head.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, N
parameters per head of the positional embedding (theta).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from megatron.hub.columns import Columns, columns_of, packed_positions, separate_documents
from megatron.hub.layers import Block, Embedding, KerpleConfig, Theta, norm_of
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


class KerplePreTrainedModel(PreTrainedModel):
    """The base class of the model without a head and of the models with a head."""

    config_class = KerpleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["theta"]
    _supports_sdpa = True
    _supports_flex_attn = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _embedding(self) -> Any:
        return self.base_model.embedding

    def get_input_embeddings(self) -> nn.Module:
        return self._embedding().word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self._embedding().word_embeddings = value


class KerpleModel(KerplePreTrainedModel):
    """The transformer without an output layer."""

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        pos = positional_of(config)
        self.embedding = Embedding(config, pos)
        # The name contains `bias`, so that `Trainer` applies no weight decay to theta.
        self.position_bias = Theta(pos, config.num_attention_heads) if pos.parameters else None
        parts = [pos.of_layer(index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Block(config, i, *part) for i, part in enumerate(parts))
        self.final_norm = norm_of(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states [B, T, D] of the new tokens, after the final norm.

        B is the number of texts, T of new tokens, S of all tokens, D of features, and H of heads.

        Args:
            input_ids: The ids of the new tokens, int64 [B, T].
            attention_mask: 0 where a token is padding, otherwise 1, [B, S]. None means no padding.
            position_ids: The position of each new token, [B or 1, T]. A 0 begins a new document.
            past_key_values: The cache with the keys and values of the earlier tokens.
            inputs_embeds: The vectors of the new tokens, [B, T, D], in place of `input_ids`.
            use_cache: Whether to return a cache. None means the value in the config.
            output_attentions: Whether to return each layer's attention probabilities [B, H, T, S].
            output_hidden_states: Whether to return the input of each layer, and the hidden states
                after the final norm.
            cu_seq_lens_q, cu_seq_lens_k: For one row of packed documents, the index of the first
                token of each document, and at the end the number of all tokens.
            max_length_q, max_length_k: Accepted for compatibility and ignored.
            seq_idx: For packed documents, a number for each token, [B, T]. Adjacent tokens with the
                same number belong to the same document.

        Raises:
            ValueError: Arguments contradict each other, or the model does not support a value.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BTD = inputs_embeds
        if x_BTD is None:
            x_BTD = self.embedding.word_embeddings(input_ids)
        keeps = not (self.gradient_checkpointing and self.training)
        if not keeps and past_key_values is not None and past_key_values.get_seq_length():
            raise ValueError("gradient checkpointing reads no past_key_values; use model.eval()")
        keeps = keeps and _or(use_cache, self.config.use_cache)
        cache = DynamicCache() if keeps and past_key_values is None else past_key_values
        ids_BT = packed_positions(position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        at = columns_of(x_BTD, attention_mask, ids_BT, cache)
        self._separate_documents(at, input_ids, cache)
        states, probs = self._states(x_BTD, at, cache, output_attentions)
        with_states = _or(output_hidden_states, self.config.output_hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            past_key_values=cache if keeps else None,
            hidden_states=states if with_states else None,
            attentions=probs,
        )

    def _separate_documents(self, at: Columns, input_ids: Tensor | None, cache: Any) -> None:
        end, restart = self.config.document_end, self.config.restart_positions
        if end is None:
            return
        if input_ids is None:
            raise ValueError("this model separates documents, so it needs input_ids")
        separate_documents(at, input_ids == end, cache, restart=restart)

    def _states(
        self, x_BTD: Tensor, at: Columns, cache: Cache | None, output_attentions: bool | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Return the hidden states before and after each layer, and the attention probabilities.

        The attention probabilities are None unless they are requested.
        """
        attentions = _or(output_attentions, self.config.output_attentions)
        name = self.config.attention
        if attentions and name != "eager":
            raise ValueError(
                f"attn_implementation {name!r} computes no attention probabilities: load the model "
                "with attn_implementation='eager'"
            )
        x_BTD = self.embedding(x_BTD, at.positions_BT)
        theta_HN = x_BTD.new_zeros(self.config.num_attention_heads, 0)
        if self.position_bias is not None:
            theta_HN = self.position_bias(x_BTD.dtype).to(x_BTD.device)
        states, probs = [x_BTD], []
        for layer in self.layers[: self.config.num_hidden_layers]:  # `assistant_early_exit`
            x_BTD, probs_BHTS = layer(
                x_BTD, theta_HN, at, past_key_values=cache, attentions=attentions
            )
            states.append(x_BTD)
            probs.append(probs_BHTS)
        return (*states[:-1], self.final_norm(x_BTD)), tuple(probs) if attentions else None


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given
