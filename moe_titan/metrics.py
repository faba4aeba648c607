"""What a run reports about itself: console line, progress bar, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from moe_titan.flops import peak_flops

if TYPE_CHECKING:
    from moe_titan.config import Config

logger = logging.getLogger(__name__)

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in ru_maxrss's unit
_PROGRESS = "{percentage:.0f}% done, {remaining} left"


def load_statistics(counts_E: Tensor) -> dict[str, float]:
    """How evenly one MoE layer's tokens fell on its experts, from the tokens per expert of one step.

    Returns:
        `max_over_mean` (1 when balanced), `cv` (standard deviation over mean, 0 when balanced), `dead` (experts without
        a token). The first two are NaN for a layer without any token.
    """
    counts_E = counts_E.double()
    mean = counts_E.mean()
    return {
        "max_over_mean": (counts_E.max() / mean).item(),
        "cv": (counts_E.std(correction=0) / mean).item(),
        "dead": int((counts_E == 0).sum()),
    }


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: what torch has allocated on a GPU, or the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**30


class MetricsLogger:
    """Reports the logged steps of a run, on rank 0; on every other rank all methods do nothing.

    `<dump_folder>/metrics.jsonl` gets one JSON object per logged step, in full precision (non-finite numbers as the
    strings "nan", "inf" and "-inf", which `float()` reads). Lines of `first_step` and later, left by an earlier run
    that got further than the checkpoint it is resumed from, are dropped, so that every step stands there once.

    The progress bar is drawn where stderr is a terminal; the share done and the time left end every log line as well.

    Args:
        config: of it: `job.dump_folder` and the section `metrics`.
        flops_per_token: model FLOPs of one trained token, see `train_flops_per_token`.
        device: this rank's device; its name gives the peak that MFU is measured against (unknown: MFU is None).
        total_steps: step at which the run ends.
        first_step: first step, counted from 1, that this process will train.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        flops_per_token: float,
        device: torch.device,
        total_steps: int,
        first_step: int = 1,
    ) -> None:
        self._log_freq = config.metrics.log_freq
        self._total_steps = total_steps
        self._is_writer = rank == 0
        if not self._is_writer:
            return
        self._flops_per_token = flops_per_token
        self._device = device
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

        folder = Path(config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = _open_jsonl(folder / "metrics.jsonl", first_step)
        self._tensorboard = None
        if config.metrics.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._tensorboard = SummaryWriter(folder / config.metrics.save_tb_folder, purge_step=first_step)

        self._show_progress = config.metrics.progress_bar
        self._devnull = open(os.devnull, "w")
        self._bar = tqdm(
            total=total_steps,
            initial=first_step - 1,
            file=sys.stderr if self._show_progress and sys.stderr.isatty() else self._devnull,
            unit="step",
            colour=None if config.metrics.disable_color_printing else "green",
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
        )

    def should_log(self, step: int) -> bool:
        """Whether the step (from 1) is one to log: the first, the last and every `metrics.log_freq`-th, on any rank."""
        return step in (1, self._total_steps) or step % self._log_freq == 0

    def log(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_tokens_per_rank: float,
        step_seconds: float,
        data_seconds: float,
        expert_load: dict[str, Tensor] | None = None,
        extra: dict[str, float] | None = None,
    ) -> None:
        """Report one step.

        Args:
            step: counted from 1.
            loss: mean over the global batch's trained tokens.
            tokens: tokens trained since the start of the run, over all ranks.
            step_tokens_per_rank: the step's trained tokens over all ranks, divided by the number of ranks.
            step_seconds: wall time of the step, or the mean over the steps since the last logged one.
            data_seconds: the part of `step_seconds` spent waiting for data.
            expert_load: by MoE layer, the tokens per expert of the step over all ranks (shape E, the same for all).
            extra: further numbers, by name, for metrics.jsonl and TensorBoard.
        """
        if not self._is_writer:
            return
        tokens_per_second = step_tokens_per_rank / step_seconds
        flops = tokens_per_second * self._flops_per_token
        record: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_second": tokens_per_second,
            "tflops": flops / 1e12,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "step_ms": step_seconds * 1e3,
            "data_ms": data_seconds * 1e3,
            "memory_gib": peak_memory_gib(self._device),
            **(extra or {}),
        }
        if expert_load:
            counts_LE = torch.stack([*expert_load.values()]).cpu()  # one transfer for all layers
            record["expert_load"] = dict(zip(expert_load, map(load_statistics, counts_LE), strict=True))

        self._jsonl.write(json.dumps(_json_safe(record), allow_nan=False) + "\n")
        self._jsonl.flush()
        if self._tensorboard is not None:
            for tag, value in _scalars(record):
                self._tensorboard.add_scalar(tag, value, step)
        self._bar.update(step - self._bar.n)
        line = _console_line(record)
        if self._show_progress:
            line += "  " + tqdm.format_meter(**(self._bar.format_dict | {"bar_format": _PROGRESS}))
        logger.info(line)

    def close(self) -> None:
        """Finish the progress bar and close the files."""
        if not self._is_writer:
            return
        self._bar.close()
        self._devnull.close()
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _open_jsonl(path: Path, first_step: int) -> TextIO:
    """Open for appending, without the lines of `first_step` and later and any cut off by a crash."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["step"] < first_step:
                kept.append(line)
        scratch = path.with_suffix(".jsonl.new")
        scratch.write_text("".join(kept))
        scratch.replace(path)
    return path.open("a")


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """TensorBoard tags and values: nested names joined by `/`, without the step itself and without unknown values."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif value is not None and key != "step":
            yield prefix + key, value


def _console_line(record: dict[str, Any]) -> str:
    parts = [
        f"step {record['step']}",
        f"loss {record['loss']:.4f}",
        f"grad_norm {record['grad_norm']:.3f}",
        f"lr {record['lr']:.2e}",
        f"tokens/s/GPU {record['tokens_per_second']:,.0f}",
        f"TFLOP/s/GPU {record['tflops']:.3g}",
        "MFU -" if record["mfu"] is None else f"MFU {record['mfu']:.1%}",
        f"memory {record['memory_gib']:.2f} GiB",
        f"step {record['step_ms']:.0f} ms",
        f"data {record['data_ms']:.0f} ms",
    ]
    return "  ".join(parts)
