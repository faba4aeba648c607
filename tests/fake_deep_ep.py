"""Stands in for the package ``deep_ep`` between the processes of a CPU group.

``Buffer`` has the signatures of DeepEP 1.2.1 (those of 2.1 but for an option), ``HybridEPBuffer`` those of the branch hybrid-ep;
both ask of their arguments what the kernels ask, and do with them what the documentation says.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    def __init__(self, num_sms: int):
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


def exchanged(value, group) -> list:
    """Everybody's value, by rank."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def check_tokens(x: Tensor) -> None:
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0


class Buffer:
    num_sms = 20
    built = 0

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None,
    ):  # fmt: skip
        assert num_nvl_bytes > 0 and not low_latency_mode
        self.group = group
        Buffer.built += 1

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):  # fmt: skip
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert topk_idx.min() >= -1 and topk_idx.max() < num_experts
        self.num_local = num_experts // self.group.size()
        holders = torch.where(topk_idx < 0, -1, topk_idx // self.num_local)
        is_token_in_rank = torch.stack([(holders == rank).any(1) for rank in range(self.group.size())], dim=1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_token_in_rank.sum(0).int(), None, per_expert, is_token_in_rank, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None,
        previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        check_tokens(x)
        me = self.group.rank()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            parts = zip(exchanged(x, self.group), handle, strict=True)
            return torch.cat([tokens[there[:, me]] for tokens, there in parts]), None, None, None, None, None
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        everybody = exchanged((x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert), self.group)
        tokens, indices, weights = (torch.cat([values[field][values[3][:, me]] for values in everybody]) for field in range(3))
        indices = torch.where((indices >= 0) & (indices // self.num_local == me), indices % self.num_local, -1)
        rows = sum(values[4] for values in everybody)[me * self.num_local :][: self.num_local].tolist()
        handle = [values[3] for values in everybody]
        return tokens, indices, torch.where(indices >= 0, weights, 0), rows, handle, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        check_tokens(x)
        assert topk_weights is None or (topk_weights.dtype == torch.float32 and topk_weights.is_contiguous())
        sums = [self._returned(each, handle) for each in (x, topk_weights) if each is not None]
        return sums[0].bfloat16(), sums[1] if topk_weights is not None else None, None

    def _returned(self, x: Tensor, handle: list[Tensor]) -> Tensor:
        """Adds, in fp32, what all ranks hold of this rank's tokens."""
        me, total = self.group.rank(), torch.zeros(len(handle[self.group.rank()]), x.shape[1])
        for rank, held in enumerate(exchanged(x, self.group)):
            counts = [int(there[:, rank].sum()) for there in handle]
            assert len(held) == sum(counts)
            total[handle[me][:, rank]] += held.split(counts)[me].float()
        return total


class HybridEPBuffer:
    def __init__(
        self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, num_sms_dispatch_api=None,
        num_sms_combine_api=None, num_sms_preprocessing_api=None, num_blocks_permute=None, num_blocks_unpermute=None,
        load_cached_kernels=False, use_shared_buffer=True, enable_custom_allgather=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None,
    ):  # fmt: skip
        self.group, self.hidden_dim, self.num_local = group, hidden_dim, num_local_experts
        self.max_tokens = max_num_of_tokens_per_rank

    def dispatch_with_permute(
        self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, num_of_experts=None, use_fp8=None,
        routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None, pad_multiple=None, handle=None,
        non_blocking=False, fuse_permute_dispatch=False, num_dispatched_tokens=None, use_host_meta=None,
    ):  # fmt: skip
        check_tokens(hidden)
        assert hidden.shape[1] == self.hidden_dim and len(hidden) <= self.max_tokens
        if handle is None:
            assert routing_map.dtype == torch.bool and routing_map.is_contiguous() and len(routing_map) == len(hidden)
            handle = exchanged(routing_map, self.group)
        else:
            assert num_permuted_tokens is not None and probs is None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous()
            probs = torch.cat([p[t, e] for e, p, t in self._rows(handle, exchanged(probs, self.group))])
        rows = torch.cat([tokens[t] for _, tokens, t in self._rows(handle, exchanged(hidden, self.group))])
        counts = torch.stack([routing_map[:, self._experts()].sum(0) for routing_map in handle]).sum(0)
        assert num_permuted_tokens in (None, int(counts.sum()))
        return rows, probs, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False, num_dispatched_tokens=None
    ):  # fmt: skip
        check_tokens(hidden)
        me = self.group.rank()
        sums = torch.zeros(len(handle[me]), self.hidden_dim)
        grads = torch.zeros(handle[me].shape) if probs is not None else None
        assert probs is None or (probs.dtype == torch.float32 and probs.is_contiguous() and probs.shape == hidden.shape[:1])
        for rank, (rows, values) in enumerate(exchanged((hidden, probs), self.group)):
            start, held = 0, torch.zeros_like(sums)
            for expert, source, t in self._rows(handle, range(len(handle)), rank):
                stop = start + len(t)
                if source == me:
                    held[t] += rows[start:stop].float()
                    if values is not None:
                        grads[t, expert] = values[start:stop]
                start = stop
            sums += held.bfloat16().float()
        return sums.bfloat16(), grads

    def _experts(self, rank: int | None = None) -> slice:
        first = (self.group.rank() if rank is None else rank) * self.num_local
        return slice(first, first + self.num_local)

    def _rows(self, handle, by_rank, rank: int | None = None):
        """Expert, what ``by_rank`` has for the source, and the source's tokens, in the order of a rank's rows."""
        experts = self._experts(rank)
        for expert in range(experts.start, experts.stop):
            for value, routing_map in zip(by_rank, handle, strict=True):
                yield expert, value, routing_map[:, expert].nonzero().flatten()
