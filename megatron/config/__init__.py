"""YAML files in the GPT-NeoX dialect -> one frozen, typed `Config`. Works without torch."""

from megatron.config.errors import ConfigError, Problem
from megatron.config.load import load_config
from megatron.config.schema import Config

__all__ = ["Config", "ConfigError", "Problem", "load_config"]
