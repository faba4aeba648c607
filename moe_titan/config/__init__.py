"""The configuration of a run: TOML file and command line, checked before anything starts."""

from moe_titan.config.errors import ConfigError
from moe_titan.config.model_args import build_model_args
from moe_titan.config.parser import load_config
from moe_titan.config.sections import Config
from moe_titan.config.toml import to_toml

__all__ = ["Config", "ConfigError", "build_model_args", "load_config", "to_toml"]
