"""Entry point: ``torchrun ... train.py --config FILE.toml [--section.key value ...]``; see ``--help``."""

import os
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

from moe_titan.startup import check_kernels_package

FAILED, WRONG_INPUT = 1, 2


@record
def main() -> int:
    check_kernels_package()
    from moe_titan.checkpoint import CheckpointError, SaveError
    from moe_titan.config import ConfigError
    from moe_titan.inputs import read_inputs
    from moe_titan.trainer import Trainer

    try:
        trainer = Trainer(read_inputs(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1"))))
    except (ConfigError, CheckpointError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # A launcher ends all processes of a machine once one has ended: the first is to say what is wrong, and only once.
            time.sleep(5)
        print(error, file=sys.stderr)
        return WRONG_INPUT
    try:
        trainer.train()
    except SaveError as error:
        print(error, file=sys.stderr)
        return FAILED
    trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
