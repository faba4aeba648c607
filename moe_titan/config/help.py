"""The text of `--help`."""

from moe_titan.config.errors import show
from moe_titan.config.sections import KEYS, OVERRIDES
from moe_titan.config.unsupported import REFUSED, WITHOUT_EFFECT
from moe_titan.config.values import type_name

_USAGE = f"""usage: torchrun [...] train.py --config FILE.toml [--section.key value ...]

Every key may stand in the TOML file (as `key = value` under [section]) or on the command line, which wins.
Lists are written a,b on the command line; a switch alone means true; none means no value.

--{OVERRIDES}.NAME VALUE
    Any argument of the model flavor, e.g. --{OVERRIDES}.n_layers 12 or --{OVERRIDES}.moe_args.num_experts 64.
"""


def help_text() -> str:
    """Every key with its type, its default and one line on what it does."""
    lines = [_USAGE]
    for name, key in KEYS.items():
        limit = f", {key.rule.allowed}" if key.rule else ""
        lines += [f"--{name}  ({type_name(key.kind)}{limit}; default {show(key.default)})", f"    {key.doc}."]
    lines += ["", "Keys of torchtitan that are not supported, and accepted only at this value:"]
    lines += [f"--{name} {show(default)}" for name, (default, _) in REFUSED.items()]
    lines += ["", "Keys of torchtitan that are accepted with any value and have no effect:"]
    lines += [f"--{name}" for name in WITHOUT_EFFECT]
    return "\n".join(lines)
