"""Checkpoints in and out: Hugging Face folders, torch.distributed.checkpoint under torchtitan's keys, upcycling, inspection.

Runs on one process without a GPU. Tensors stay unread until they are written, one at a time.
"""

from moe_titan.interchange.tensors import InterchangeError

__all__ = ["InterchangeError"]
