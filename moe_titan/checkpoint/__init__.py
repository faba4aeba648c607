"""Saving and resuming a run with torch.distributed.checkpoint, under torchtitan's keys."""

from moe_titan.checkpoint.checkpointer import DTYPES, Checkpointer, Due
from moe_titan.checkpoint.errors import CheckpointError, SaveError
from moe_titan.checkpoint.folder import Found, complete_steps, find_checkpoint
from moe_titan.checkpoint.state import CORPUS_KEYS, Progress

__all__ = [
    "CORPUS_KEYS",
    "DTYPES",
    "CheckpointError",
    "Checkpointer",
    "Due",
    "Found",
    "Progress",
    "SaveError",
    "complete_steps",
    "find_checkpoint",
]
