"""Define the model as a class of `transformers` that generates with a KV cache.

An export consists of the weights and one Python file, which `bundle` writes. The exported file
first contains the modules that this module imports, then the positional embeddings of the model,
and at the end this module. Therefore these modules import only torch, transformers and each other.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, N
columns of theta, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from megatron.hub.columns import columns_of, packed_positions, separate_documents
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
    """What the models with different heads have in common."""

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
    """The model without a head. Its parameters named `bias` or `norm` are not decayed by `Trainer`,

    and so is theta, whose name is `position_bias.theta`.
    """

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        pos = positional_of(config)
        self.embedding = Embedding(config, pos)
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
        """Return the hidden states of the new tokens after the final norm.

        Args:
            input_ids: The new tokens, int64 [B, T].
            attention_mask: 0 where a token is padding, otherwise 1, [B, S]. None means no padding.
            position_ids: The position of each new token, [B or 1, T]. A 0 begins a new document.
            past_key_values: The cache with the tokens before the new ones.
            inputs_embeds: The vectors of the new tokens, [B, T, D], in place of `input_ids`.
            use_cache: Whether to return a cache. None takes the config's value.
            output_attentions: Whether to return each layer's attention probabilities [B, H, T, S].
            output_hidden_states: Whether to return the states before each layer, and the last.
            cu_seq_lens_q, cu_seq_lens_k: The columns at which the documents of a single row begin,
                and then the number of its tokens.
            max_length_q, max_length_k: The longest document's length, which nothing here needs.
            seq_idx: A number for each token. Neighbours of one document have equal numbers, [B, T].

        Raises:
            ValueError: Arguments contradict each other, or have values that the model cannot serve.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config, x_BTD = self.config, inputs_embeds
        if x_BTD is None:
            x_BTD = self.embedding.word_embeddings(input_ids)
        keeps_all = _or(output_hidden_states, config.output_hidden_states)
        attentions = _or(output_attentions, config.output_attentions)
        if attentions and config._attn_implementation != "eager":
            raise ValueError(
                f"attn_implementation {config._attn_implementation!r} computes no attention "
                "probabilities: load the model with attn_implementation='eager'"
            )
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if past_key_values is None and _or(use_cache, config.use_cache):
            past_key_values = DynamicCache()
        ids_BT = packed_positions(position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        at = columns_of(x_BTD, attention_mask, ids_BT, past_key_values)
        if config.document_end is not None:
            if input_ids is None:
                raise ValueError("this model separates documents, so it needs input_ids")
            ended_BT, restart = input_ids == config.document_end, config.restart_positions
            separate_documents(at, ended_BT, past_key_values, restart=restart)
        x_BTD = self.embedding(x_BTD, at.positions_BT)
        theta_HN = x_BTD.new_zeros(config.num_attention_heads, 0)
        if self.position_bias is not None:
            theta_HN = self.position_bias(x_BTD.dtype).to(x_BTD.device)
        states, probs = [x_BTD], []
        for layer in self.layers:
            x_BTD, probs_BHTS = layer(
                x_BTD, theta_HN, at, past_key_values=past_key_values, attentions=attentions
            )
            states = [*states, x_BTD] if keeps_all else states
            probs.append(probs_BHTS)
        x_BTD = self.final_norm(x_BTD)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTD,
            past_key_values=past_key_values if _or(use_cache, config.use_cache) else None,
            hidden_states=(*states[:-1], x_BTD) if keeps_all else None,
            attentions=tuple(probs) if attentions else None,
        )


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


class KerpleForCausalLM(KerplePreTrainedModel, GenerationMixin):
    """The language model. `model.position_bias.theta` is theta, which training may change."""

    _tied_weights_keys = {"output.weight": "model.embedding.word_embeddings.weight"}
    accepts_loss_kwargs = True  # `Trainer` then passes `num_items_in_batch`

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        self.model = KerpleModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.output = new_embeddings

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, past_key_values: Cache, **others: Any
    ) -> Tensor | None:
        """Return the mask in a static cache's length, so that one graph serves each new token."""
        if attention_mask is None:
            return None
        length: Any = getattr(past_key_values.layers[0], "max_cache_len")  # noqa: B009
        missing = length - attention_mask.shape[1]
        return F.pad(attention_mask, (0, missing), value=1)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        above: Any = super()
        inputs = above.prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_position", None)  # of transformers 4, and it follows from the cache
        return inputs

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the new tokens, and their loss if there are labels.

        `KerpleModel.forward` describes the other arguments.

        Args:
            labels: The new tokens, or -100 for tokens without a loss, [B, T].
            logits_to_keep: The number of last tokens whose logits are returned, or the indices of
                the tokens. 0 means all tokens.
            num_items_in_batch: The number by which the sum of losses is divided. None means the
                number of tokens with a loss.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            output_attentions, output_hidden_states, cu_seq_lens_q, cu_seq_lens_k,
            max_length_q, max_length_k, seq_idx, return_dict=True,
        )  # fmt: skip
        kept = logits_to_keep
        kept = slice(-kept, None) if isinstance(kept, int) else kept
        logits_BTV = self.output(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            given = {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, **given)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class KerpleForSequenceClassification(KerplePreTrainedModel):
    """The model with a linear layer on the last token that is not padding."""

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        self.model = KerpleModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 2, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutputWithPast:
        """Return the scores of the classes [B, classes], and their loss if there are labels.

        `KerpleModel.forward` describes the other arguments.

        Args:
            attention_mask: See `KerpleModel.forward`. None means that the last token counts.
            labels: The class of each text, [B].
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            output_attentions, output_hidden_states, return_dict=True,
        )  # fmt: skip
        states_BTD = outputs.last_hidden_state
        last_B: Any = states_BTD.shape[1] - 1
        if attention_mask is not None:
            seen_BT = attention_mask[:, -states_BTD.shape[1] :].bool()
            last_B = last_B - seen_BT.flip(1).int().argmax(1)
        row_B = torch.arange(len(states_BTD), device=states_BTD.device)
        logits = self.score(states_BTD[row_B, last_B])
        loss = None
        if labels is not None:
            given = {"logits": logits, "pooled_logits": logits, "config": self.config}
            loss = self.loss_function(labels=labels, **given)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
