"""One optimizer step of a parallelised model: all of the mathematics of training, and nothing of its bookkeeping."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.protocols.model import BaseModelArgs

from float8.convert import Float8Options, convert
from float8.experts import Float8Products
from moe_titan.data import IGNORED, MicroBatch
from moe_titan.further_tokens import further_on
from moe_titan.initialization import initialize, record_initialization
from moe_titan.layers.balance_loss import BalanceLoss
from moe_titan.layers.expert_placement import ExpertPlacement
from moe_titan.layers.load_balancer import LoadBalancer
from moe_titan.layers.moe import MoE
from moe_titan.layers.prediction import Further
from moe_titan.layers.row_stash import RowStash, row_bytes
from moe_titan.models import attention_masks, build_model
from moe_titan.optimizer import ShardedAdamW
from moe_titan.step_result import Numbers, StepResult
from moe_titan.unread_steps import UnreadSteps
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.float8_gather import gather_in_float8
from parallelisms.folded_mesh import FoldedMesh
from parallelisms.parallelize import ParallelOptions, parallelize
from parallelisms.replicas import sum_replicas
from parallelisms.routing import RoutingTape
from parallelisms.tensor_parallel import sequence_share, weight_parts


@dataclass(frozen=True)
class TrainOptions:
    """What a step computes, as opposed to how (:class:`ParallelOptions`)."""

    seed: int = 0
    master_dtype: torch.dtype = torch.float32
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    implementation: str = "fused"
    sequence_balance_coeff: float = 0.0
    batch_balance_coeff: float = 0.0
    mtp_layers: int = 0
    mtp_loss_scale: float = 0.3
    eos_id: int = 0
    float8: Float8Options = Float8Options()


class Engine:
    """A model laid out over the ranks, its optimizer, its load balancer and the placement of its experts.

    Args:
        name: "llama3", "qwen3" or "deepseek_v3".
        args: torchtitan's model arguments.
        mesh: the layout; its ranks must all construct the engine together.
        device: where this rank computes.
    """

    def __init__(
        self,
        name: str,
        args: BaseModelArgs,
        mesh: FoldedMesh,
        device: torch.device,
        options: TrainOptions,
        parallel: ParallelOptions,
    ):
        self.args, self.mesh, self.device, self.options, self.parallel = args, mesh, device, options, parallel
        self.model = build_model(name, args, options.mtp_layers)
        self.conversion = convert(self.model, options.float8, mesh.layout.etp, weight_parts(self.model, mesh.layout.tp))
        self.model.output.group = mesh.group("tp")
        programs = record_initialization(self.model, device)
        for name, parameter in self.model.named_parameters():
            if ".router." not in name:
                parameter.data = parameter.data.to(options.master_dtype)
        self._set_balance_losses()
        self.capacity = RowCapacity(parallel.capacity_factor, device)
        self.plan = parallelize(self.model, mesh, parallel, self.capacity)
        initialize(self.model, programs, options.seed, device)
        gather = options.float8.all_gather
        self._scales = gather_in_float8(self.model, self.plan, self.conversion) if gather else None
        self.optimizer = ShardedAdamW(
            self.model,
            self.plan,
            param_dtype=parallel.param_dtype,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            implementation=options.implementation,
        )
        self._replicas = [each for name, each in self.optimizer.parameters.items() if self.plan[name].replicated]
        self.balancer = LoadBalancer(self.model, mesh.stage_group)
        moes = {name: module for name, module in self.model.named_modules() if isinstance(module, MoE)}
        self.stash = self._stash(list(moes.values()))
        products = [moe.experts.products for moe in moes.values()] if options.float8.keep_weights else []
        self._keeping = [each for each in products if isinstance(each, Float8Products)]
        experts = {moe.layer: (moe, [f"{name}.experts.{weight}" for weight in ("w13", "w2")]) for name, moe in moes.items()}
        by_expert = all(self.plan[name].shard_dim == 0 for _, weights in experts.values() for name in weights)
        self.placement = ExpertPlacement(experts, self.optimizer, mesh, by_expert)
        self._unread = UnreadSteps(self.optimizer, self.capacity)

    def step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Trains on this rank's micro-batches (equally many, equally shaped on every rank).

        Does not wait for the device. A loss or gradient that is not finite changes no parameter, and the result tells of it;
        until somebody has waited for that result, further steps change nothing either.

        With a capacity or stash factor the same goes for a step whose rows did not fit: waiting for it, or for a later one, runs
        it and those since again, so their micro-batches must stay as they are. When more than ``unread_steps.MOST`` are unread,
        this waits for the oldest.
        """
        return self._unread.launch(partial(self._step, tuple(micro_batches), lr))

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Loss per trained token of the global batch; leaves no trace in model, optimizer or balancer."""
        self._unread.wait()
        self.model.eval()
        self._update_scales()
        denominator = self.count_trained(micro_batches).clamp(min=1)
        loss = self._evaluate_on(micro_batches, denominator)
        if (exceeded := self.capacity.take_exceeded()) is not None and exceeded:
            with self.capacity.lifted():
                loss = self._evaluate_on(micro_batches, denominator)
        if self.mesh.data_group is not None:
            dist.all_reduce(loss, group=self.mesh.data_group)
        return loss.item()

    def count_trained(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Trained tokens of the global batch: the one number that losses are divided by. fp64 scalar on the device."""
        count = sum(int((batch.labels_BS != IGNORED).sum()) for batch in micro_batches)
        total = torch.full((), count, dtype=torch.float64, device=self.device)
        if self.mesh.data_group is not None:
            dist.all_reduce(total, group=self.mesh.data_group)
        return total

    @torch.enable_grad()  # whoever waits for it
    def _step(self, micro_batches: Sequence[MicroBatch], lr: float) -> Numbers:
        self.model.train()
        self._update_scales()
        self.optimizer.expect(len(micro_batches))
        denominator = self.count_trained(micro_batches).clamp(min=1)
        losses_N, balance = self._train_on(micro_batches, denominator)
        sum_replicas(self._replicas, self.mesh.data_group)
        if self.mesh.data_group is not None:
            dist.all_reduce(losses_N, group=self.mesh.data_group)
        exceeded = self.capacity.take_exceeded()
        if exceeded is not None:
            self.optimizer.halted |= exceeded
        update = self.optimizer.step(lr, self.options.max_norm)
        load = self.balancer.step(self.optimizer.halted)
        mtp_loss = losses_N[1:].mean() if self.options.mtp_layers else None
        return Numbers(update, losses_N[0], denominator, load, self._total(balance), exceeded, mtp_loss)

    def _update_scales(self) -> None:
        if self._scales is not None:
            self._scales.update()

    def _train_on(self, micro_batches: Sequence[MicroBatch], denominator: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Gradients and counts of these micro-batches and of no others.

        Returns the losses of the next token and of those further on, and the balance loss of each batch.
        """
        self.balancer.forget()
        for parameter in self.model.parameters():
            parameter.grad = None
        losses_N = torch.zeros(1 + self.options.mtp_layers, device=self.device, dtype=torch.float32)
        balance: list[Tensor] = []
        with ExitStack() as stack:
            for products in self._keeping:
                stack.enter_context(products.keeping_weights())
            for batch in micro_batches:
                batch_losses_N, tape = self._forward_backward(batch, denominator)
                losses_N += batch_losses_N
                self.balancer.add(tape)
                if (balance_loss := tape.balance_loss()) is not None:
                    balance.append(balance_loss)
        return losses_N, balance

    def _evaluate_on(self, micro_batches: Sequence[MicroBatch], denominator: Tensor) -> Tensor:
        loss = torch.zeros((), device=self.device, dtype=torch.float32)
        for batch in micro_batches:
            batch = self._on_device(batch)
            with RoutingTape(self._valid(batch), denominator).recording():
                _, sums_N = self._loss_sums(batch)
                loss += sums_N[0] / denominator
        return loss

    def _forward_backward(self, batch: MicroBatch, denominator: Tensor) -> tuple[Tensor, RoutingTape]:
        batch = self._on_device(batch)
        if self.stash is not None:
            self.stash.clear()
        tape = RoutingTape(self._valid(batch), denominator)
        with tape.recording():
            total, sums_N = self._loss_sums(batch)
        # On this thread, which only waits otherwise: on one of autograd's own, Python takes longer for the same work.
        with torch.autograd.set_multithreading_enabled(False):
            (total / denominator).backward()
        return sums_N.double() / denominator, tape

    def _on_device(self, batch: MicroBatch) -> MicroBatch:
        return MicroBatch(*(None if field is None else field.to(self.device, non_blocking=True) for field in batch))

    def _loss_sums(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """What is trained on, and the sums [N] of the cross-entropy that it is made of, without gradient.

        Sums over this data rank's trained tokens, the same on its tensor-parallel peers: of the next token, and in training of
        each that is predicted beyond it.
        """
        masks = attention_masks(self.args, batch.tokens_BS, self.options.eos_id)
        depths = self.options.mtp_layers if self.model.training else 0
        if not depths:
            with self.model.output.expecting(batch.labels_BS, IGNORED):
                return self.model(batch.tokens_BS, attention_masks=masks)
        eos_id = self.options.eos_id if self.args.attn_mask_type == "block_causal" else None
        deeper = [further_on(batch, depth, eos_id) for depth in range(1, 1 + depths)]
        labels = torch.cat([each.labels_BS for each in (batch, *deeper)])
        further = [Further(each.tokens_BS, self._valid(each)) for each in deeper]
        with self.model.output.expecting(labels, IGNORED, (1.0, *[self.options.mtp_loss_scale / depths] * depths)):
            return self.model(batch.tokens_BS, attention_masks=masks, further=further)

    def _valid(self, batch: MicroBatch) -> Tensor | None:
        if batch.valid_BS is None:
            return None
        tp = self.mesh.layout.tp
        return (sequence_share(batch.valid_BS, self.mesh.dim("tp")) if tp > 1 else batch.valid_BS).flatten()

    def _stash(self, moes: list[MoE]) -> RowStash | None:
        """One for all layers whose experts' rows have fixed room."""
        if self.parallel.stash_factor is None:
            return None
        even = {moe.experts: moe.dispatcher.even_rows(self.args.moe_args.top_k) for moe in moes}
        fixed = {experts: rows for experts, rows in even.items() if rows is not None}
        if not fixed:
            return None
        no_rows = torch.empty(0, 2, self.args.moe_inter_dim // self.mesh.layout.etp, dtype=self.parallel.param_dtype)
        size = 0
        for experts, rows in fixed.items():
            kept = experts.products.keep(no_rows, torch.zeros(1, dtype=torch.int32))  # another kind of rows in some layers
            size += ceil(self.parallel.stash_factor * rows) * row_bytes(kept)
        stash = RowStash(size, self.capacity)
        for experts in fixed:
            experts.stash = stash
        return stash

    def _set_balance_losses(self) -> None:
        options = self.options
        if not (options.sequence_balance_coeff or options.batch_balance_coeff):
            return
        for module in self.model.modules():
            if isinstance(module, MoE):
                module.router.balance_loss = BalanceLoss(
                    self.args.moe_args.top_k,
                    options.sequence_balance_coeff,
                    options.batch_balance_coeff,
                    sequence_group=self.mesh.group("tp"),
                    batch_group=self.mesh.stage_group,
                )

    def _total(self, balance: list[Tensor]) -> Tensor | None:
        if not balance:
            return None
        total = torch.stack(balance).sum()
        if self.mesh.stage_group is not None:
            dist.all_reduce(total, group=self.mesh.stage_group)
        return total
