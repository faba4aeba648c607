"""``python -m moe_titan.convert SOURCE TARGET``: Hugging Face folder <-> checkpoint <-> checkpoint in another dialect.

Needs no GPU and no process group, and memory for one tensor. Exit codes: 0 done, 2 wrong input.
"""

import argparse
import sys
from collections.abc import Sequence

from moe_titan.startup import check_kernels_package


def main(argv: Sequence[str]) -> int:
    """Raises InterchangeError for input that cannot be converted."""
    from moe_titan.interchange import InterchangeError, command
    from moe_titan.interchange.dcp import Checkpoint, write_in_dialect
    from moe_titan.interchange.stored_model import format_of, new_folder, read_model

    parser = argparse.ArgumentParser(prog="python -m moe_titan.convert", description=__doc__)
    command.add_model_options(parser)
    options = parser.parse_args(argv)
    source = format_of(options.source)
    if source == "dcp" and options.dialect:
        checkpoint = Checkpoint(options.source)
        if checkpoint.dialect == options.dialect:
            raise InterchangeError(f"{options.source}: has the keys of torchtitan {options.dialect} already")
        if options.dtype:
            raise InterchangeError(f"--dtype = {options.dtype}: another dialect has the same tensors; leave it out")
        if options.drop_mtp:
            raise InterchangeError("--drop-mtp: another dialect has the same tensors; leave it out")
        with new_folder(options.target) as folder:
            write_in_dialect(checkpoint, folder, options.dialect)
        print(f"wrote {options.target}, all that {options.source} holds under the keys of torchtitan {options.dialect}")
        return 0
    model = read_model(
        options.source,
        options.config,
        options.assets,
        command.DTYPES.get(options.dtype, command.DTYPES["bfloat16"]),
        options.drop_mtp,
    )
    command.write(model, "dcp" if source == "hf" else "hf", options)
    return 0


if __name__ == "__main__":
    check_kernels_package()
    from moe_titan.interchange.command import run

    sys.exit(run(main))
