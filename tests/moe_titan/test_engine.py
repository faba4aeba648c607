"""A training step against a reference written from first principles, and what surrounds the step."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from layout_runs import (
    CLIPPED,
    assert_same_run,
    biases,
    errors_of_run,
    full,
    full_gradients,
    full_parameters,
    relative_error,
    train,
)
from reference import train_reference
from torchtitan.models.llama3.model.args import TransformerModelArgs

from moe_titan.data import IGNORED, MicroBatch
from moe_titan.engine import TrainOptions
from moe_titan.optimizer import NonFiniteGradient, Update
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import local

BALANCED = replace(CLIPPED, sequence_balance_coeff=0.1, batch_balance_coeff=0.05)


def with_args(model, **fields):
    name, args = model
    args = copy(args)
    vars(args).update(fields)
    return name, args


def with_moe(model, **fields):
    return with_args(model, moe_args=replace(model[1].moe_args, **fields))


LLAMA3 = "llama3", TransformerModelArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=tiny.VOCAB, max_seq_len=tiny.SEQ)
VARIANTS = {
    "llama3": LLAMA3,
    "qwen3_tied_embeddings": with_args(tiny.qwen3(), enable_weight_tying=True),
    "qwen3_dense_grouped_queries": with_args(tiny.qwen3(), moe_enabled=False, n_kv_heads=4, qk_norm=False),
    "qwen3_no_norm_gate_bias": with_moe(tiny.qwen3(), route_norm=False, route_scale=2.5, gate_bias=True, top_k=1),
    "qwen3_shared_top3": tiny.qwen3(num_shared_experts=2, top_k=3, num_experts=7),
    "deepseek_groups": tiny.deepseek(num_experts=8, num_expert_groups=4, num_limited_groups=2),
    "deepseek_query_latents": with_args(tiny.deepseek(), q_lora_rank=10),
    "deepseek_without_bias": with_moe(tiny.deepseek(), load_balance_coeff=1e-9),
}


def assert_equals_reference(run: dict, model, options: TrainOptions, make_batch=tiny.global_batch, tolerance=1e-5) -> dict:
    batches = [tiny.share(make_batch(step, 12), 0, 1, 4) for step in range(3)]
    expected = train_reference(model, run["initial"], run["initial_bias"], batches, options)
    assert all(norm > options.max_norm for norm in expected["norm"])
    assert_same_run(run, expected, tolerance)
    return expected


@pytest.mark.parametrize("make_batch", [tiny.global_batch, tiny.padded_batch])
@pytest.mark.parametrize("options", [CLIPPED, BALANCED], ids=["plain", "balance_losses"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("model", [tiny.qwen3, tiny.deepseek])
def test_step_equals_reference(pool, model, score_func, options, make_batch) -> None:
    model = model(score_func=score_func)
    run = pool.run(1, train, model, Layout(), options, 3, 12, 3, make_batch)[0]
    expected = assert_equals_reference(run, model, options, make_batch)
    assert (expected["balance"][0] is None) == (options is CLIPPED)
    tokens = 12 * tiny.SEQ if make_batch is tiny.global_batch else int(tiny.padded_batch(0, 12).valid_BS.sum())
    assert all(sum(load) == 2 * tokens for load in expected["load"][0].values())


def _train_fp64(model) -> dict:
    options = replace(CLIPPED, master_dtype=torch.float64)
    return train(model, Layout(), options, samples=12, param_dtype=torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variants_equal_reference(pool, variant) -> None:
    """In fp64, where only the reduction of gradients rounds to fp32."""
    run = pool.run(1, _train_fp64, VARIANTS[variant])[0]
    assert_equals_reference(run, VARIANTS[variant], CLIPPED, tolerance=3e-6)


def test_no_clipping_below_the_maximum(pool) -> None:
    options = replace(CLIPPED, max_norm=100.0)
    run = pool.run(1, train, tiny.qwen3(), Layout(), options, 2, 6)[0]
    batches = [tiny.share(tiny.global_batch(step, 6), 0, 1, 2) for step in range(2)]
    assert_same_run(run, train_reference(tiny.qwen3(), run["initial"], run["initial_bias"], batches, options))


def test_comparison_sees_a_wrong_weight(pool) -> None:
    model = tiny.qwen3()
    run = pool.run(1, train, model, Layout(), CLIPPED, 1, 3)[0]
    batches = [tiny.share(tiny.global_batch(0, 3), 0, 1, 1)]
    wrong = run["initial"] | {"layers.1.moe.experts.w3": run["initial"]["layers.1.moe.experts.w3"] * 1.001}
    errors = errors_of_run(run, train_reference(model, wrong, run["initial_bias"], batches, CLIPPED))
    assert max(errors.values()) > 1e-4


def _bf16(layout: Layout) -> dict:
    return train(tiny.deepseek(), layout, param_dtype=torch.bfloat16)


def test_bf16_compute_stays_near_fp32(pool) -> None:
    expected = pool.run(1, train, tiny.deepseek(), Layout())[0]
    for layout in (Layout(), Layout(dp_shard=2, tp=2, ep=2)):
        run = pool.run(layout.world, _bf16, layout)[0]
        assert relative_error(run["loss"], expected["loss"]) < 2e-3
        assert all(value.dtype == np.float32 for value in (run["params"] | run["grads"][0]).values())
        for name, grad in expected["grads"][0].items():
            assert relative_error(run["grads"][0][name], grad) < 0.1, name


def _one_backward(layout: Layout) -> dict:
    return train(tiny.qwen3(), layout, steps=4, samples=2, local_batch=2 // layout.dp, param_dtype=torch.bfloat16)


def test_split_weights_train_as_those_of_fsdp(pool) -> None:
    """A bf16 gradient goes into the fp32 master whether FSDP2 holds it or the optimizer's two halves do."""
    split, sharded = (pool.run(layout.world, _one_backward, layout)[0] for layout in (Layout(), Layout(dp_shard=2)))
    assert {str(value.dtype) for value in split["params"].values()} == {"float32"}
    assert relative_error(split["loss"], sharded["loss"]) < 1e-3
    for name, value in sharded["params"].items():
        moved = value - sharded["initial"][name]
        assert relative_error(split["params"][name] - split["initial"][name], moved) < 0.3, name


def _accumulated(layout: Layout, micro_batches: int) -> tuple[set[str], dict[str, np.ndarray]]:
    """Dtypes of the gradients that the optimizer sees, experts' and whole ones, and the experts' gradients."""
    engine = tiny.build(tiny.qwen3(), layout, param_dtype=torch.bfloat16)
    seen: tuple[set[str], dict[str, np.ndarray]] = set(), {}

    def look(lr: float, max_norm: float) -> Update:
        experts = {name: p.grad for name, p in engine.optimizer.parameters.items() if ".experts.w" in name}
        seen[0].update(str(grad.dtype) for grad in experts.values())
        seen[1].update({name: full(grad) for name, grad in experts.items()})
        return Update(torch.ones(()), {}, 1)

    engine.optimizer.step = look
    batches = tiny.share(tiny.global_batch(0, 4), engine.mesh.data_rank, layout.dp, micro_batches)
    assert len(batches) == micro_batches
    engine.step(batches, lr=1e-3)
    return seen


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2, ep=2)], ids=str)
def test_gradients_of_several_micro_batches_add_up_in_fp32(pool, layout) -> None:
    (one, whole), (two, sums) = (pool.run(layout.world, _accumulated, layout, count)[0] for count in (1, 2))
    assert one == {"torch.bfloat16"} and two == {"torch.float32"}
    for name, grad in whole.items():
        assert 0 < relative_error(sums[name], grad) < 1e-2, name  # bf16 rounds each micro-batch's, and not their sum


def _split_and_all(model) -> tuple[int, int]:
    engine = tiny.build(model, Layout(tp=2), param_dtype=torch.bfloat16)
    parameters = engine.optimizer.parameters.values()
    return sum(p.dtype == torch.bfloat16 for p in parameters), len(parameters)


def test_a_dense_model_of_one_data_rank_is_not_fsdps(pool) -> None:
    split, every = pool.run(2, _split_and_all, LLAMA3)[0]
    assert split == every > 0


def _step_after_a_failed_one() -> float:
    engine = tiny.build(tiny.qwen3(), Layout(), param_dtype=torch.bfloat16)
    router = engine.optimizer.parameters["layers.1.moe.router.gate.weight"]

    def spoil(parameter: torch.Tensor) -> None:
        parameter.grad.fill_(torch.nan)

    hook = router.register_post_accumulate_grad_hook(spoil)
    with pytest.raises(NonFiniteGradient):
        engine.step(tiny.share(tiny.global_batch(0, 2), 0, 1, 1), lr=1e-3).wait()
    hook.remove()
    return engine.step(tiny.share(tiny.global_batch(0, 2), 0, 1, 2), lr=1e-3).loss


def test_a_step_may_follow_a_failed_one(pool) -> None:
    assert np.isfinite(pool.run(1, _step_after_a_failed_one)[0])


def _train_and_evaluate(evaluate: bool) -> dict:
    engine = tiny.build(tiny.deepseek(), Layout(dp_shard=2, tp=2, ep=2), BALANCED)
    data = [tiny.share(tiny.padded_batch(step, 12), engine.mesh.data_rank, 2, 2) for step in range(3)]
    losses, results = [], []
    for batches in data:
        if evaluate:
            losses += [engine.evaluate(batches), engine.evaluate(data[0])]
        results.append(engine.step(batches, lr=1e-3))
    return {
        "evaluated": losses,
        "loss": [result.loss for result in results],
        "balance": [result.balance_loss for result in results],
        "load": [{k: v.tolist() for k, v in result.expert_load.items()} for result in results],
        "state": full_parameters(engine) | biases(engine),
    }


def test_evaluation_leaves_no_trace(pool) -> None:
    plain, evaluated = (pool.run(4, _train_and_evaluate, evaluate)[0] for evaluate in (False, True))
    for key in ("loss", "balance", "load"):
        assert plain[key] == evaluated[key]
    for name, value in plain["state"].items():
        assert np.array_equal(value, evaluated["state"][name]), name
    assert evaluated["evaluated"][::2] == pytest.approx(evaluated["loss"], rel=1e-6)


def _diverge(layout: Layout, rank: int) -> tuple[str, bool, bool]:
    engine = tiny.build(tiny.qwen3(), layout)
    before = full_parameters(engine) | biases(engine)
    hook = None
    if torch.distributed.get_rank() == rank:
        name = "layers.1.moe.experts.w2"
        parameter = dict(engine.model.named_parameters())[name]

        def spoil(parameter: torch.Tensor) -> None:
            local(parameter.grad).fill_(torch.nan)

        hook = parameter.register_post_accumulate_grad_hook(spoil)
    batches = tiny.share(tiny.global_batch(0, 6 * layout.dp), engine.mesh.data_rank, layout.dp, 2)
    failed = engine.step(batches, lr=1e-3)
    if hook is not None:
        hook.remove()
    engine.step(batches, lr=1e-3)  # before anybody has asked
    with pytest.raises(NonFiniteGradient) as raised:
        failed.wait()
    after = full_parameters(engine) | biases(engine)
    clear = not any(local(moment).any() for _, _, moment in engine.optimizer.moments())
    clear &= not any(count for _, count in engine.optimizer.step_counts())
    unchanged = all(np.array_equal(before[name], after[name]) for name in before)
    engine.step(batches, lr=1e-3).wait()
    trained = any(not np.array_equal(before[name], after) for name, after in full_parameters(engine).items())
    return str(raised.value), unchanged and trained, clear


def test_non_finite_gradient_stops_the_step(pool) -> None:
    for message, unchanged, clear in pool.run(4, _diverge, Layout(dp_shard=2, tp=2, ep=4), 2):
        assert "layers.1.moe.experts.w2 on rank 2" in message
        assert "the loss is 4." in message
        assert unchanged and clear


def _nothing_to_train() -> tuple[float, float, int, bool]:
    engine = tiny.build(tiny.qwen3(), Layout(dp_shard=2))
    tokens, labels, _ = tiny.global_batch(0, 3)
    result = engine.step([MicroBatch(tokens, torch.full_like(labels, IGNORED), None)], lr=1e-3)
    return result.loss, result.grad_norm, result.tokens, all(np.isfinite(p).all() for p in full_parameters(engine).values())


def test_a_batch_without_trained_tokens(pool) -> None:
    for loss, norm, _, finite in pool.run(2, _nothing_to_train):
        assert loss == norm == 0.0 and finite


def _one_sided() -> dict:
    """Only data rank 1 has trained tokens."""
    engine = tiny.build(tiny.qwen3(), Layout(dp_shard=2))
    tokens, labels, _ = tiny.global_batch(0, 3)
    if engine.mesh.data_rank == 0:
        labels = torch.full_like(labels, IGNORED)
    grads = {}
    engine.optimizer.step = lambda lr, max_norm: grads.update(full_gradients(engine)) or Update(torch.ones(()), {}, 1)
    result = engine.step([MicroBatch(tokens, labels, None)], lr=1e-3)
    return {"loss": result.loss, "tokens": result.tokens, "grads": grads}


def test_loss_is_divided_by_the_tokens_of_all_ranks(pool) -> None:
    """A mean of per-rank means would give half of it."""
    run = pool.run(2, _one_sided)[0]
    alone = pool.run(1, train, tiny.qwen3(), Layout(), CLIPPED, 1, 3)[0]
    assert run["tokens"] == alone["tokens"][0]
    assert run["loss"] == pytest.approx(alone["loss"][0], rel=1e-6)
    for name, grad in alone["grads"][0].items():
        assert relative_error(run["grads"][name], grad) < 1e-5, name


def _router_type() -> list[str]:
    engine = tiny.build(tiny.qwen3(), Layout(), TrainOptions(master_dtype=torch.bfloat16))
    return [str(p.dtype) for name, p in engine.model.named_parameters() if ".router." in name]


def test_routers_stay_in_fp32(pool) -> None:
    assert set(pool.run(1, _router_type)[0]) == {"torch.float32"}
