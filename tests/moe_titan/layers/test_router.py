"""The router and the balance losses on one rank."""

import math
from dataclasses import replace

import pytest
import torch
from reference import choose_experts
from torchtitan.models.moe.moe import MoEArgs

from kernels.route import largest
from moe_titan.layers.balance_loss import BalanceLoss, attach_loss
from moe_titan.layers.router import Router
from parallelisms.routing import RoutingTape

T, D, E = 50, 16, 12
ARGS = MoEArgs(num_experts=E, top_k=3, score_func="sigmoid", route_norm=True)
GROUPED = replace(ARGS, num_expert_groups=4, num_limited_groups=2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_router(args: MoEArgs) -> Router:
    router = Router(args, D)
    torch.nn.init.normal_(router.gate.weight)
    return router


def route(router: Router, x_TD: torch.Tensor, bias_E: torch.Tensor | None = None, tape: RoutingTape | None = None, batch=1):
    return router(x_TD, bias_E, batch, tape, "layer")


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("args", [ARGS, GROUPED, replace(GROUPED, num_limited_groups=1)], ids=["all", "2 of 4", "1 of 4"])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_equals_reference(args, score_func, biased) -> None:
    args = replace(args, score_func=score_func)
    router, x_TD = make_router(args), torch.randn(T, D)
    bias_E = 0.3 * torch.randn(E) if biased else None
    routing = route(router, x_TD, bias_E)
    logits_TE = x_TD @ router.gate.weight.t()
    scores_TE = (logits_TE.softmax(1) if score_func == "softmax" else logits_TE.sigmoid()).tolist()
    bias = bias_E.tolist() if biased else [0.0] * E
    assert routing.topk_experts_TK.tolist() == [choose_experts(scores, bias, args) for scores in scores_TE]


def test_group_limited_choice_stays_in_groups() -> None:
    experts_TK = route(make_router(GROUPED), torch.randn(T, D), torch.randn(E)).topk_experts_TK
    assert all(len({e // 3 for e in experts}) <= 2 for experts in experts_TK.tolist())
    free_TK = route(make_router(ARGS), torch.randn(T, D), torch.randn(E)).topk_experts_TK
    assert any(len({e // 3 for e in experts}) == 3 for experts in free_TK.tolist())


def test_groups_with_negative_scores_are_not_replaced_by_others() -> None:
    """A bias below -1 makes every score negative; experts of groups left out must still lose."""
    experts_TK = route(make_router(GROUPED), torch.randn(T, D), torch.full((E,), -5.0)).topk_experts_TK
    assert all(len({e // 3 for e in experts}) <= 2 for experts in experts_TK.tolist())


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    router, x_TD = make_router(replace(ARGS, route_norm=False)), torch.randn(T, D)
    bias_E = torch.zeros(E)
    bias_E[7] = 10.0
    routing = route(router, x_TD, bias_E)
    assert (routing.topk_experts_TK[:, 0] == 7).all() and not (route(router, x_TD).topk_experts_TK[:, 0] == 7).all()
    scores_TE = (x_TD @ router.gate.weight.t()).sigmoid()
    torch.testing.assert_close(routing.topk_weights_TK, scores_TE.gather(1, routing.topk_experts_TK))


def test_equal_bias_changes_nothing() -> None:
    router, x_TD = make_router(GROUPED), torch.randn(T, D)
    plain, biased = route(router, x_TD), route(router, x_TD, torch.full((E,), 0.25))
    assert torch.equal(plain.topk_experts_TK, biased.topk_experts_TK)
    assert torch.equal(plain.topk_weights_TK, biased.topk_weights_TK)


def test_norm_and_scale() -> None:
    x_TD = torch.randn(T, D)
    routing = route(make_router(replace(ARGS, route_scale=2.5)), x_TD)
    torch.testing.assert_close(routing.topk_weights_TK.sum(1), torch.full((T,), 2.5))


def test_underflowing_scores_give_no_nan() -> None:
    router = make_router(ARGS)
    with torch.no_grad():
        router.gate.weight.fill_(-1e4)
    routing = route(router, torch.ones(T, D))
    routing.topk_weights_TK.sum().backward()
    assert not routing.topk_weights_TK.any() and router.gate.weight.grad.isfinite().all()


def test_ties_go_to_the_lower_index() -> None:
    assert largest(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), 2).tolist() == [[1, 2]]
    router = make_router(ARGS)
    torch.nn.init.zeros_(router.gate.weight)
    assert route(router, torch.randn(T, D)).topk_experts_TK.tolist() == [[0, 1, 2]] * T


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_fp32_under_bf16_input(score_func) -> None:
    """Scores of bf16 logits would be off by 2^-9."""
    router, x_TD = make_router(replace(ARGS, score_func=score_func, route_norm=False)), torch.randn(T, D).bfloat16()
    routing = route(router, x_TD)
    logits_TE = x_TD.double() @ router.gate.weight.double().t()
    scores_TE = logits_TE.softmax(1) if score_func == "softmax" else logits_TE.sigmoid()
    assert routing.topk_weights_TK.dtype == torch.float32
    expected_TK = scores_TE.gather(1, routing.topk_experts_TK).float()
    torch.testing.assert_close(routing.topk_weights_TK, expected_TK, rtol=1e-5, atol=0)


def test_padding_is_not_routed_counted_or_trained_on() -> None:
    router, x_TD = make_router(ARGS), torch.randn(T, D, requires_grad=True)
    valid_T = torch.rand(T) < 0.5
    routing = route(router, x_TD, tape=RoutingTape(valid_T))
    alone = route(router, x_TD[valid_T])
    assert (routing.topk_experts_TK[~valid_T] == E).all() and not routing.topk_weights_TK[~valid_T].any()
    assert torch.equal(routing.topk_experts_TK[valid_T], alone.topk_experts_TK)
    assert torch.equal(routing.tokens_per_expert_E, alone.tokens_per_expert_E)
    assert routing.tokens_per_expert_E.dtype == torch.int64
    routing.topk_weights_TK.square().sum().backward()
    assert not x_TD.grad[~valid_T].any() and x_TD.grad[valid_T].any()


def test_counts() -> None:
    routing = route(make_router(ARGS), torch.randn(T, D))
    assert routing.tokens_per_expert_E.tolist() == [(routing.topk_experts_TK == e).sum().item() for e in range(E)]


def test_forward_changes_nothing() -> None:
    router, x_TD, bias_E = make_router(GROUPED), torch.randn(T, D), torch.randn(E)
    before = [tensor.clone() for tensor in (*router.state_dict().values(), x_TD, bias_E)]
    route(router, x_TD, bias_E)
    assert all(torch.equal(a, b) for a, b in zip(before, (*router.state_dict().values(), x_TD, bias_E), strict=True))


@pytest.mark.parametrize(("sequence", "batch"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_uniform_routing_gives_the_coefficient(sequence, batch) -> None:
    """Every expert equally probable and chosen equally often; 4 sequences of 12 tokens, all of the loss's tokens trained."""
    scores_TE = torch.full((48, E), 1.0)
    for t in range(48):  # A hair's breadth decides.
        scores_TE[t, [(3 * t + k) % E for k in range(3)]] += 1e-6
    loss = BalanceLoss(3, sequence, batch)(scores_TE, None, 4, 48.0)
    assert loss.item() == pytest.approx(sequence + batch, rel=1e-5)


def test_one_favoured_set_of_experts_gives_the_most() -> None:
    scores_TE = torch.zeros(8, E)
    scores_TE[:, :3] = 1.0
    assert BalanceLoss(3, 1.0, 0.0)(scores_TE, None, 2, 8.0).item() == pytest.approx(E / 3)


def balance_reference(scores, valid, sequences: int, K: int, sequence_coeff: float, batch_coeff: float, denominator: float):
    """The formulas, token by token, in whatever type the scores have."""
    T = len(scores) // sequences
    total = 0
    per_sequence = [[t for t in range(s * T, (s + 1) * T) if valid[t]] for s in range(sequences)]
    for coeff, sets in ((sequence_coeff, per_sequence), (batch_coeff, [sum(per_sequence, [])])):
        for tokens in sets:
            for e in range(E):
                chosen = sum(e in sorted(range(E), key=lambda i, t=t: -scores[t][i].item())[:K] for t in tokens)
                for t in tokens:
                    total += coeff * E / (K * len(tokens)) * chosen * scores[t][e] / scores[t].sum() / denominator
    return total


@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_and_gradient_equal_the_formula(padded) -> None:
    scores_TE = torch.rand(20, E, dtype=torch.float64, requires_grad=True)
    valid_T = torch.rand(20) < 0.6 if padded else torch.ones(20, dtype=torch.bool)
    expected = balance_reference(scores_TE, valid_T.tolist(), 4, 3, 0.3, 0.2, 17.0)
    actual = BalanceLoss(3, 0.3, 0.2)(scores_TE, valid_T if padded else None, 4, 17.0)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, scores_TE)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_a_sequence_of_padding_alone_adds_nothing() -> None:
    scores_TE, valid_T = torch.rand(20, E, requires_grad=True), torch.arange(20) < 5
    loss = BalanceLoss(3, 0.3, 0.2)(scores_TE, valid_T, 4, 17.0)
    loss.backward()
    assert math.isfinite(loss.item()) and scores_TE.grad.isfinite().all() and not scores_TE.grad[5:].any()


def test_balance_loss_reaches_the_gate_once() -> None:
    """The gradient of the routed weights' sum plus the loss, by finite differences in fp64."""
    router = make_router(ARGS).double()
    router.balance_loss = BalanceLoss(3, 0.3, 0.2)
    x_TD, valid_T = torch.randn(12, D, dtype=torch.float64), torch.arange(12) % 5 > 0

    def total(weight_ED: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            router.gate.weight.copy_(weight_ED)
        routing = route(router, x_TD, tape=RoutingTape(valid_T, 9.0), batch=3)
        return routing.topk_weights_TK.square().sum(), routing.balance_loss

    weight_ED = router.gate.weight.detach().clone()
    direction_ED = torch.randn(E, D, dtype=torch.float64)
    step = 1e-6
    (up, up_loss), (down, down_loss) = (total(weight_ED + sign * step * direction_ED) for sign in (1, -1))
    slope = ((up + up_loss) - (down + down_loss)).item() / (2 * step)
    weights, _ = total(weight_ED)
    router.gate.weight.grad = None
    weights.backward()
    assert (router.gate.weight.grad * direction_ED).sum().item() == pytest.approx(slope, rel=1e-6)


def test_attached_loss_has_weight_one() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = attach_loss(x, y**2)
    assert torch.equal(out, x)
    (100 * out).sum().backward()
    assert x.grad.tolist() == [100.0] * 3 and y.grad.item() == 4.0
