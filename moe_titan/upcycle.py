"""``python -m moe_titan.upcycle SOURCE TARGET --granularity G --copies X --top-k K``: a dense model into a mixture of experts.

SOURCE is a llama3 or qwen3 without experts, as a Hugging Face folder or a checkpoint. The MoE model starts as the same function.
Exit codes: 0 done, 2 wrong input.
"""

import argparse
import sys
from collections.abc import Sequence

from moe_titan.startup import check_kernels_package


def main(argv: Sequence[str]) -> int:
    """Raises InterchangeError for a model that cannot be upcycled so."""
    from moe_titan.interchange import command
    from moe_titan.interchange.stored_model import read_model
    from moe_titan.interchange.upcycling import Upcycling, upcycle

    parser = argparse.ArgumentParser(prog="python -m moe_titan.upcycle", description=__doc__)
    command.add_model_options(parser)
    parser.add_argument("--to", choices=("dcp", "hf"), default="dcp", help="format to write (default: %(default)s)")
    parser.add_argument("--granularity", type=_count, required=True, help="G: shards that a feed-forward is cut into")
    parser.add_argument("--copies", type=_count, required=True, help="X: copies of each shard; there are G * X experts")
    parser.add_argument("--top-k", type=_count, required=True, help="experts a token goes to, a multiple of G")
    parser.add_argument("--shared-experts", type=_count, default=0, help="of one shard each, at most G (default: %(default)s)")
    parser.add_argument(
        "--noise", type=command.positive, default=0.0, help="added to experts, relative to their own standard deviation"
    )
    parser.add_argument("--seed", type=int, default=0, help="of router and noise (default: %(default)s)")
    parser.add_argument("--drop-rope-scaling", action="store_true", help="lose llama3's, which no MoE model here has")
    parser.set_defaults(dtype="float32")
    options = parser.parse_args(argv)
    how = Upcycling(
        options.granularity,
        options.copies,
        options.top_k,
        options.shared_experts,
        options.noise,
        options.seed,
        options.drop_rope_scaling,
    )
    dense = read_model(options.source, options.config, options.assets, command.DTYPES["float32"], options.drop_mtp)
    command.write(upcycle(dense, how), options.to, options)
    return 0


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


if __name__ == "__main__":
    check_kernels_package()
    from moe_titan.interchange.command import run

    sys.exit(run(main))
