"""What the command lines of this package have in common."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moe_titan.interchange.architectures import approximations
from moe_titan.interchange.dialects import DIALECTS
from moe_titan.interchange.stored_model import StoredModel, write_hugging_face, write_model
from moe_titan.interchange.tensors import InterchangeError

WRONG_INPUT = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(command: Callable[[Sequence[str]], int]) -> int:
    """The exit code of a command line: 2 with a message on stderr where the input is wrong."""
    try:
        return command(sys.argv[1:])
    except InterchangeError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Where a model comes from, where it goes, and how it is written."""
    parser.add_argument("source", type=Path, help="folder of a checkpoint's step, or of a Hugging Face model")
    parser.add_argument("target", type=Path, help="new folder")
    parser.add_argument("--config", type=Path, help="TOML of the run that saved the checkpoint (default: found beside it)")
    parser.add_argument("--assets", type=Path, help="Hugging Face folder with the tokenizer (default: what the source brings)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are, FP8 to bfloat16)")
    parser.add_argument("--dialect", choices=DIALECTS, help="torchtitan release whose keys a checkpoint is written with")
    parser.add_argument("--shard-gb", type=positive, default=5.0, help="largest safetensors file (default: %(default)s)")
    parser.add_argument("--drop-expert-bias", action="store_true", help="leave it out where Hugging Face's model has none")
    parser.add_argument("--drop-mtp", action="store_true", help="leave out what predicts tokens beyond the next")


def write(model: StoredModel, form: str, options: argparse.Namespace) -> None:
    """Writes the model as the options say, in format ``form``, and prints what was written and what to mind."""
    dtype = DTYPES[options.dtype] if options.dtype else None
    if form == "hf":
        write_hugging_face(model, options.target, int(options.shard_gb * 1e9), dtype, options.drop_expert_bias)
    else:
        write_model(model, options.target, options.dialect or DIALECTS[0], dtype)
    for note in (*model.notes, *approximations(model.name, model.args)):
        print(f"note: {note}")
    print(f"wrote {options.target}")
    if form == "dcp":
        print("a run starts from it with checkpoint.initial_load_path, and this (also in its model.toml) in its configuration:\n")
        print((options.target / "model.toml").read_text())


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be > 0")
    return value
