"""Load YAML files with GPT-NeoX's keys into one frozen, typed `Config`, without importing torch."""

from megatron.config.errors import ConfigError, Problem
from megatron.config.load import load_config
from megatron.config.schema import Config

__all__ = ["Config", "ConfigError", "Problem", "load_config"]
