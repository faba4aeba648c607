"""``python -m moe_titan.inspect PATH``: what a checkpoint or a Hugging Face folder holds, and what in it looks wrong.

Reads tensor by tensor. Exit codes: 0 nothing found, 1 something looks wrong (NaN, infinity, zeros, equal experts), 2 wrong input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_titan.startup import check_kernels_package


def main(argv: Sequence[str]) -> int:
    """Raises InterchangeError where there is nothing to inspect, or it is damaged."""
    from moe_titan.interchange.inspection import inspect, render

    parser = argparse.ArgumentParser(prog="python -m moe_titan.inspect", description=__doc__)
    parser.add_argument("path", type=Path, help="folder of a checkpoint's step, or of a Hugging Face model")
    parser.add_argument("--no-values", action="store_true", help="look at names, shapes and types alone, and read no tensor")
    options = parser.parse_args(argv)
    report = inspect(options.path, not options.no_values)
    print(render(report, not options.no_values))
    return 1 if report.findings else 0


if __name__ == "__main__":
    check_kernels_package()
    from moe_titan.interchange.command import run

    sys.exit(run(main))
