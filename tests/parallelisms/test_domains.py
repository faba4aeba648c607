"""Which ranks are a domain, on hosts that are only described here."""

import pytest
import torch.distributed as dist

from parallelisms import domains
from parallelisms.domains import domain_size, ranks_of_host


@pytest.mark.parametrize(
    ("ep", "etp", "wanted", "expected"),
    [
        (4, 1, 2, 2),
        (2, 4, 4, 4),
        (2, 4, 2, 2),
        (4, 2, 4, 4),
        (4, 1, 4, None),  # one domain
        (4, 1, 8, None),  # a part of one
        (4, 1, 1, None),  # every rank by itself
        (6, 1, 4, None),  # the last would be smaller
        (2, 6, 4, None),  # one would hold two thirds of an expert, another a third of two
    ],
)
def test_size(ep, etp, wanted, expected) -> None:
    assert domain_size(ep, etp, wanted) == expected


def _size(hosts: str, ep: int) -> tuple[int, int | None]:
    domains.host = lambda: hosts[dist.get_rank()]
    return ranks_of_host(), domain_size(ep, 1, None)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", (2, 2)), ("aaaa", (4, None)), ("abcd", (1, None)), ("aaab", (1, None)), ("abab", (1, None)), ("aaabbb", (3, 3))],
)
def test_ranks_of_a_host(pool, hosts, expected) -> None:
    assert pool.run(len(hosts), _size, hosts, len(hosts)) == [expected] * len(hosts)
