"""Python logging for a run of many processes."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

_OURS = ("moe_titan", "parallelisms", "float8", "kernels", "__main__")


class _ConsoleHandler(logging.Handler):
    """Writes to stderr without tearing a progress bar that is drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def setup_logging(dump_folder: str, rank: int, mark: str = "") -> None:
    """Log every rank to `<dump_folder>/logs/rank-R.log` (appending) and rank 0 to the console as well.

    Our own packages log from INFO on, all others from WARNING on; Python warnings become log lines. `mark` begins
    every message. A second call replaces the first.
    """
    folder = Path(dump_folder, "logs")
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(folder / f"rank-{rank}.log")]
    if rank == 0:
        handlers.append(_ConsoleHandler())
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname).1s {mark}%(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=handlers,
        force=True,
    )
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
