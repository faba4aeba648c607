"""The resolved configuration as TOML."""

from typing import Any

import tomli_w

from moe_titan.config.sections import KEYS, OVERRIDES, Config


def to_toml(config: Config) -> str:
    """Write every key in TOML that `load_config` reads back to an equal Config (keys without a value are left out)."""
    names = [*KEYS, *(f"{OVERRIDES}.{name}" for name in config.model.overrides)]
    root: dict[str, Any] = {}
    for name in names:
        *sections, leaf = name.split(".")
        table = root
        for section in sections:
            table = table.setdefault(section, {})
        if (value := config.get(name)) is not None:
            table[leaf] = value
    return tomli_w.dumps(root)
