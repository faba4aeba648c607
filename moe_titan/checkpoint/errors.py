"""What can go wrong with checkpoints."""

from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(ValueError):
    """A checkpoint that was asked for cannot be loaded; the message says which and why."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; the message says why and which one is the newest. Raised on every rank."""


def first_cause(error: BaseException) -> str:
    """Of torch.distributed.checkpoint's errors the one that a rank met, without the traceback in the text."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
