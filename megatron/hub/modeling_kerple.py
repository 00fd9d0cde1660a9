"""Define the model as classes of `transformers`: a language model, and a classifier of texts.

An export consists of the weights and one Python file, which `bundle` writes. The Python file joins
the modules of the positional embeddings, the modules that this module imports, and this module.
Therefore these modules import only torch, transformers and each other.

Legend: see `backbone`. V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from megatron.hub.backbone import KerpleModel, KerplePreTrainedModel
from megatron.hub.layers import KerpleConfig

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["kerple"] = "KerpleForCausalLM"  # `Trainer` shifts its labels


class KerpleForCausalLM(KerplePreTrainedModel, GenerationMixin):
    """The language model: the transformer with an output layer."""

    _tied_weights_keys = {"output.weight": "model.embedding.word_embeddings.weight"}
    accepts_loss_kwargs = True  # `Trainer` then passes `num_items_in_batch`
    _get_static_cache_init_shape = lambda self: None  # noqa: E731  keys may hold more numbers

    def __init__(self, config: KerpleConfig):
        super().__init__(config)
        self.model = KerpleModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.output = new_embeddings

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, past_key_values: Cache, **others: Any
    ) -> Tensor | None:
        """Return the attention mask, padded to the length of a static cache.

        All steps of a generation then have the same shapes and use the same compiled graph.
        """
        if attention_mask is None:
            return None
        length: Any = getattr(past_key_values.layers[0], "max_cache_len")  # noqa: B009
        return F.pad(attention_mask, (0, length - attention_mask.shape[1]), value=1)

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # `generate` looks for the argument `inputs_embeds` in the signature.
        above: Any = super()
        inputs = above.prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        inputs.pop("cache_position", None)  # of transformers 4, and it follows from the cache
        inputs.pop("tokenizer", None)  # of `stop_strings`, which `generate` itself reads
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
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the new tokens, and the loss if `labels` are given.

        The other arguments are described at `KerpleModel.forward`, to which they are passed.

        Args:
            labels: The ids of the new tokens, or -100 for tokens without a loss, [batch, tokens].
            logits_to_keep: The number of tokens at the end of each text whose logits are returned,
                or the indices of these tokens. 0 means all tokens.
            num_items_in_batch: The number by which the sum of losses is divided. None means the
                number of tokens with a loss.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            return_dict=True, **others,
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


class KerpleForSequenceClassification(GenericForSequenceClassification, KerplePreTrainedModel):
    """The classifier: the transformer with a linear layer on the last token that is not padding."""

    accepts_loss_kwargs = False

    def __init__(self, config: KerpleConfig):
        KerplePreTrainedModel.__init__(self, config)  # the other class asks AutoModel
        self.model = KerpleModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 2, bias=False)
        self.post_init()
