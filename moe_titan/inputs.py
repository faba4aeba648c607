"""Everything that a user gives a run, read and checked before any process group starts."""

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchtitan.protocols.model import BaseModelArgs

from float8.convert import Float8Options, convert
from moe_titan.checkpoint import Found, find_checkpoint
from moe_titan.config import Config, ConfigError, build_model_args, load_config
from moe_titan.data import Tokenizer, build_source, build_tokenizer
from moe_titan.data.source import Source
from moe_titan.models import build_model
from parallelisms.tensor_parallel import weight_parts


@dataclass(frozen=True)
class Inputs:
    """``checkpoint``: what to start from, None for a fresh start. ``lock``: while open, rank 0's hold on the output folder."""

    config: Config
    model_args: BaseModelArgs
    tokenizer: Tokenizer
    source: Source
    checkpoint: Found | None
    lock: IO[str] | None


def read_inputs(argv: Sequence[str], world_size: int) -> Inputs:
    """Reads configuration, tokenizer and corpus, and finds the checkpoint to start from.

    Raises:
        ConfigError: any of them is missing or does not fit; the message says what to change.
    """
    config = load_config(argv, world_size)
    args = build_model_args(config)
    try:
        if float8_options(config).enabled:
            degrees, model = config.parallelism, build_model(config.model.name, args)
            parts = weight_parts(model, degrees.tensor_parallel_degree)
            convert(model, float8_options(config), degrees.expert_tensor_parallel_degree, parts)
        tokenizer, source = build_tokenizer(config), build_source(config.training)
        checkpoint = find_checkpoint(config) if config.checkpoint.enable else None
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if tokenizer.vocab_size > args.vocab_size:
        raise ConfigError(
            f"model.overrides.vocab_size: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model embeds only "
            f"{args.vocab_size}; set it to at least {tokenizer.vocab_size}, or choose another tokenizer"
        )
    return Inputs(config, args, tokenizer, source, checkpoint, _claim_folder(config))


def float8_options(config: Config) -> Float8Options:
    return Float8Options(**vars(config.float8))


def _claim_folder(config: Config) -> IO[str] | None:
    """Makes the output folder and holds it for this run, on rank 0."""
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") != "0":
            return None
        lock = open(folder / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        problem = "another run is writing there; wait for it, or choose another folder"
    except OSError as error:
        problem = f"must be a folder that can be written ({error.strerror}); choose another"
    raise ConfigError(config.problem("job.dump_folder", problem))
