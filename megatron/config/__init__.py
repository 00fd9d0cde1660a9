"""Floor 0: YAML files in the GPT-NeoX dialect -> one frozen, typed ``Config``. No torch here."""

from megatron.config.errors import ConfigError, Problem
from megatron.config.load import load_config
from megatron.config.schema import Config

__all__ = ["Config", "ConfigError", "Problem", "load_config"]
