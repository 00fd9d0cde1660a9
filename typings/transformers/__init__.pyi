"""Where the names are that the project imports from transformers, for the type checker alone.

The package's own `__init__.py` tells a type checker to read the files of all its 400 models, which
takes longer than all the rest. A name that is missing here is imported from its file, or added.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.utils import GenerationMixin as GenerationMixin
from transformers.modeling_utils import PreTrainedModel as _PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)

class PreTrainedModel(_PreTrainedModel):
    # To infer that post_init returns None, a type checker would read the files of all models.
    def post_init(self) -> None: ...
