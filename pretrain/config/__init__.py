"""One YAML file describes a run: what may stand in it, how it is read, and what a resume may change."""

from pretrain.config.changes import ConfigChange, config_sha256, describe_changes, diff_configs
from pretrain.config.load import config_from_dict, load_config, with_overrides
from pretrain.config.schema import RunConfig
from pretrain.config.yaml_text import dump_yaml

__all__ = [
    "ConfigChange",
    "RunConfig",
    "config_from_dict",
    "config_sha256",
    "describe_changes",
    "diff_configs",
    "dump_yaml",
    "load_config",
    "with_overrides",
]
