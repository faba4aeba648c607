"""A training run from its configuration: process group, data, engine, checkpoints and reports."""

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchtitan.protocols.model import BaseModelArgs

from kernels.peers import set_timeout as set_dispatch_timeout
from moe_titan.checkpoint import DTYPES, Checkpointer, Due, Progress
from moe_titan.config import Config, ConfigError, to_toml
from moe_titan.data import build_dataloader
from moe_titan.engine import Engine, TrainOptions
from moe_titan.flops import num_parameters, train_flops_per_token
from moe_titan.heartbeat import Heartbeat
from moe_titan.inputs import Inputs, float8_options
from moe_titan.log import setup_logging
from moe_titan.lr_schedule import lr_factor
from moe_titan.metrics import MetricsLogger
from moe_titan.moment import Moment
from moe_titan.step_result import StepResult
from parallelisms.float8_gather import NothingToGather
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.parallelize import ParallelOptions

logger = logging.getLogger(__name__)


class _Taken(NamedTuple):
    """A step that the device has been given: where it begins, and how long the host waited for its data."""

    step: int
    lr: float
    begins: Moment
    data_seconds: float
    result: StepResult


class Trainer:
    """Holds a run's parts and drives them. Constructing it starts the process group; :meth:`close` ends it."""

    def __init__(self, inputs: Inputs):
        self.config = config = inputs.config
        self._lock = inputs.lock
        self.device = start_processes(config)
        setup_logging(config.job.dump_folder, dist.get_rank(), "[emulated low precision] " if config.float8.emulate else "")
        store = dist.PrefixStore("heartbeat", dist.distributed_c10d._get_default_store())
        self._heartbeat = Heartbeat(store, dist.get_rank(), dist.get_world_size(), config.comm.init_timeout_seconds)
        self._set_determinism()
        args = inputs.model_args
        layout = layout_of(config)
        self.mesh = FoldedMesh(layout, self.device.type)
        self.data = build_dataloader(config, inputs.source, inputs.tokenizer, self.mesh.data_rank, layout.dp)
        self.engine = build_engine(config, args, self.mesh, self.device, inputs.tokenizer.eos_id)
        self._set_timeout(config.comm.init_timeout_seconds)
        self.checkpointer = Checkpointer(config, self.engine, self.data) if config.checkpoint.enable else None
        start = Progress()
        if self.checkpointer is not None and inputs.checkpoint is not None:
            start = self.checkpointer.load(inputs.checkpoint)
        self.step, self.tokens, self.schedule_step = start
        self.metrics = MetricsLogger(
            config,
            dist.get_rank(),
            train_flops_per_token(args, config.training.seq_len, config.mtp.num_layers),
            self.device,
            config.training.steps,
            first_step=self.step + 1,
        )
        self._unlogged: list[tuple[float, float]] = []  # seconds of each step, and those of them spent waiting for data
        self._finished: Moment | None = None
        self._describe()

    def train(self) -> None:
        """Trains up to ``training.steps``, from wherever the run stands.

        Raises:
            NonFiniteGradient: naming step, rank and parameter; the last checkpoint is as it was.
            SaveError: a checkpoint could not be saved; the last one is as it was.
        """
        steps = self.config.training.steps
        if self.checkpointer is not None and self.config.checkpoint.create_seed_checkpoint:
            self.checkpointer.save(Progress(), self._next_lr(), last=True)
            return
        if self.step >= steps:
            logger.warning("nothing is left to train: the run stands at step %d and training.steps = %d", self.step, steps)
        gc.collect()
        gc.disable()  # Left to itself, Python collects on each rank at another moment, and every rank waits for each.
        first, running = self.step + 1, None
        with self._profiler() as profiler:
            while self.step < steps:
                # A step ahead of the device, so that it never waits for the host.
                before, running = running, self._take_step()
                if before is not None:
                    self._finish(before)
                due = Due() if self.checkpointer is None else self.checkpointer.due(self.step, self.step == steps)
                if due.save or self.step in (first, steps):
                    self._finish(running)
                    running = None
                if due.save:
                    self._save(due)
                if due.end:
                    break
                if self.step == first:
                    # Everything has been compiled and connected.
                    self._set_timeout(self.config.comm.train_timeout_seconds)
                if self.step % self.config.training.gc_freq == 0:
                    gc.collect(1)
                if profiler is not None:
                    profiler.step()
        logger.info("training ends at step %d after %d tokens", self.step, self.tokens)

    def close(self) -> None:
        self.data.close()
        self.metrics.close()
        self._heartbeat.close()
        dist.destroy_process_group()
        if self._lock is not None:
            self._lock.close()

    def _take_step(self) -> _Taken:
        begins, began = Moment(self.device), time.perf_counter()
        batches = self.data.next_step()
        data_seconds = time.perf_counter() - began
        step, lr = self.step + 1, self._next_lr()
        with _naming(step):
            result = self.engine.step(batches, lr)
        self.step, self.schedule_step = step, self.schedule_step + 1
        return _Taken(step, lr, begins, data_seconds, result)

    def _finish(self, taken: _Taken) -> None:
        """Waits for a step, takes note of what it did, and moves experts and reports where the step is one to do so after."""
        with _naming(taken.step):
            result = taken.result.wait()
        self.tokens += result.tokens
        interval = self.config.moe.rebalance_interval
        if interval and (taken.step == 1 or taken.step % interval == 0):
            self.engine.placement.rebalance(result.expert_load)
        before, self._finished = self._finished, result.numbers.finished
        # A step that was repeated ends after the one that follows it begins.
        seconds = min(moment.seconds_until(self._finished) for moment in (before, taken.begins) if moment is not None)
        self._unlogged.append((seconds, taken.data_seconds))
        if self.metrics.should_log(taken.step):
            seconds, data_seconds = (sum(column) / len(column) for column in zip(*self._unlogged, strict=True))
            self._log(taken, seconds, data_seconds)
            self._unlogged.clear()

    def _save(self, due: Due) -> None:
        assert self.checkpointer is not None
        progress = Progress(self.step, self.tokens, self.schedule_step)
        self.checkpointer.save(progress, self._next_lr(), last=self.step == self.config.training.steps, wait=due.wait)

    def _next_lr(self) -> float:
        schedule = self.config.lr_scheduler
        return self.config.optimizer.lr * lr_factor(
            self.schedule_step,
            total_steps=schedule.total_steps or self.config.training.steps,
            warmup_steps=schedule.warmup_steps,
            decay_ratio=schedule.decay_ratio,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        )

    def _log(self, taken: _Taken, seconds: float, data_seconds: float) -> None:
        result = taken.result
        losses = {"balance_loss": result.balance_loss, "mtp_loss": result.mtp_loss}
        self.metrics.log(
            taken.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=taken.lr,
            tokens=self.tokens,
            step_tokens_per_rank=result.tokens / dist.get_world_size(),
            step_seconds=seconds,
            data_seconds=data_seconds,
            expert_load=result.expert_load,
            extra={name: value for name, value in losses.items() if value is not None},
        )

    def _profiler(self) -> AbstractContextManager[Any]:
        settings = self.config.profiling
        if not settings.enable_profiling:
            return nullcontext()
        folder = Path(self.config.job.dump_folder) / settings.save_traces_folder
        folder.mkdir(parents=True, exist_ok=True)
        idle = max(settings.profile_freq - settings.profiler_warmup - settings.profiler_active, 0)
        return torch.profiler.profile(
            record_shapes=True,  # types and sizes tell which products ran in which precision
            schedule=torch.profiler.schedule(wait=idle, warmup=settings.profiler_warmup, active=settings.profiler_active),
            on_trace_ready=lambda trace: trace.export_chrome_trace(
                str(folder / f"rank{dist.get_rank()}_step{self.step}.json.gz")
            ),
        )

    def _set_timeout(self, seconds: int) -> None:
        """Bounds how long this rank waits for another, whatever it waits in."""
        self._heartbeat.timeout = seconds
        set_dispatch_timeout(seconds)
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def _set_determinism(self) -> None:
        debug = self.config.debug
        torch.manual_seed(debug.seed)
        if debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)

    def _describe(self) -> None:
        if dist.get_rank():
            return
        resolved = to_toml(self.config)
        (Path(self.config.job.dump_folder) / "config.toml").write_text(resolved)
        if float8_options(self.config).enabled:
            conversion = self.engine.conversion
            (Path(self.config.job.dump_folder) / "float8.txt").write_text(conversion.table())
            logger.info("low precision, in full in float8.txt:\n%s", conversion.summary())
        if self.config.job.print_config:
            logger.info("configuration:\n%s", resolved)
        logger.info(
            "%s: %s %s, %.3g parameters, %s on %d x %s, from step %d",
            self.config.job.description,
            self.config.model.name,
            self.config.model.flavor,
            num_parameters(self.engine.model),
            self.mesh.layout,
            dist.get_world_size(),
            self.device.type,
            self.step,
        )


@contextmanager
def _naming(step: int) -> Iterator[None]:
    """Errors of the step say which one it was, and where."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(f"in step {step} on rank {dist.get_rank()}")
        raise


def start_processes(config: Config) -> torch.device:
    """Starts the default process group; a process that no launcher started is a world of its own."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.comm.init_timeout_seconds),
    )
    return device


def build_engine(config: Config, args: BaseModelArgs, mesh: FoldedMesh, device: torch.device, eos_id: int) -> Engine:
    """The engine of a configuration and of its model's arguments. Collective over the mesh.

    Raises:
        ConfigError: float8.all_gather has no weight to gather in this layout, which is known once the weights are cut.
    """
    try:
        return Engine(config.model.name, args, mesh, device, _train_options(config, eos_id), _parallel_options(config))
    except NothingToGather as error:
        raise ConfigError(config.problem("float8.all_gather", str(error))) from error


def layout_of(config: Config) -> Layout:
    degrees = config.parallelism
    return Layout(
        pp=degrees.pipeline_parallel_degree,
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree,
    )


def _train_options(config: Config, eos_id: int) -> TrainOptions:
    return TrainOptions(
        seed=config.debug.seed,
        master_dtype=DTYPES[config.training.dtype],
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        max_norm=config.training.max_norm,
        implementation=config.optimizer.implementation,
        sequence_balance_coeff=config.moe.sequence_balance_loss_coeff,
        batch_balance_coeff=config.moe.batch_balance_loss_coeff,
        mtp_layers=config.mtp.num_layers,
        mtp_loss_scale=config.mtp.loss_scaling_factor,
        eos_id=eos_id,
        float8=float8_options(config),
    )


def _parallel_options(config: Config) -> ParallelOptions:
    recompute, compiling = config.activation_checkpoint, config.compile
    return ParallelOptions(
        dispatcher=config.moe.dispatcher,
        dispatch_tokens=config.training.local_batch_size * config.training.seq_len // config.parallelism.tensor_parallel_degree,
        dispatch_sms=config.moe.dispatch_sms,
        dispatch_domain=config.moe.dispatch_domain,
        capacity_factor=config.moe.capacity_factor,
        stash_factor=config.moe.stash_factor,
        param_dtype=DTYPES[config.training.mixed_precision_param],
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward != "never",
        recompute=recompute.mode,
        recompute_option=recompute.selective_ac_option,
        compile_backend=compiling.backend if compiling.enable and "model" in compiling.components else None,
    )
