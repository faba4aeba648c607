"""Multi-token prediction: a step against a reference written from first principles, and what surrounds it."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from layout_runs import CLIPPED, assert_same_run, biases, errors_of_run, full_parameters, relative_error, train
from reference import train_reference
from torchtitan.models.llama3.model.args import TransformerModelArgs

from moe_titan.data import IGNORED, MicroBatch
from moe_titan.engine import TrainOptions
from moe_titan.further_tokens import further_on
from parallelisms.folded_mesh import Layout

BALANCED = replace(CLIPPED, sequence_balance_coeff=0.1, batch_balance_coeff=0.05)
EOS = 7


def with_args(model, **fields):
    name, args = model
    args = copy(args)
    vars(args).update(fields)
    return name, args


LLAMA3 = "llama3", TransformerModelArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=tiny.VOCAB, max_seq_len=tiny.SEQ)
VARIANTS = {
    "qwen3": tiny.qwen3(),
    "deepseek": tiny.deepseek(),
    "llama3": LLAMA3,
    "qwen3_dense_tied": with_args(tiny.qwen3(), moe_enabled=False, enable_weight_tying=True),
    "deepseek_all_dense": with_args(tiny.deepseek(), n_dense_layers=2),
}


def document_batch(step: int, samples: int) -> MicroBatch:
    """Documents of one token and more, some of which end with a sample."""
    batch = tiny.global_batch(step, samples)
    generator = torch.Generator().manual_seed(step)
    ends = torch.rand(batch.tokens_BS.shape, generator=generator) < 0.2
    tokens = torch.where(ends, EOS, batch.tokens_BS)
    return MicroBatch(tokens, batch.labels_BS)


def assert_equals_reference(run: dict, model, options: TrainOptions, make_batch=tiny.global_batch, tolerance=1e-5) -> dict:
    batches = [tiny.share(make_batch(step, 6), 0, 1, 2) for step in range(3)]
    expected = train_reference(model, run["initial"], run["initial_bias"], batches, options)
    assert_same_run(run, expected, tolerance)
    return expected


def _train_fp64(model, depths: int, make_batch=tiny.global_batch) -> dict:
    options = replace(CLIPPED, master_dtype=torch.float64, mtp_layers=depths, eos_id=EOS)
    return train(model, Layout(), options, samples=6, make_batch=make_batch, param_dtype=torch.float64)


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_equals_reference(pool, variant, depths) -> None:
    """In fp64, where only the reduction of gradients rounds to fp32."""
    run = pool.run(1, _train_fp64, VARIANTS[variant], depths)[0]
    expected = assert_equals_reference(run, VARIANTS[variant], replace(CLIPPED, mtp_layers=depths), tolerance=3e-6)
    assert all(loss > 2 for loss in expected["mtp"])
    assert any(name.startswith(f"mtp_layers.{depths - 1}.") for name in expected["params"])


@pytest.mark.parametrize("make_batch", [tiny.global_batch, tiny.padded_batch])
@pytest.mark.parametrize("model", [tiny.qwen3, tiny.deepseek])
def test_balance_losses_and_padding(pool, model, make_batch) -> None:
    """Positions without a further token are routed nowhere, and their number is not in any mean."""
    options = replace(BALANCED, mtp_layers=2, mtp_loss_scale=0.7)
    run = pool.run(1, train, model(), Layout(), options, 3, 6, 3, make_batch)[0]
    expected = assert_equals_reference(run, model(), options, make_batch)
    if make_batch is tiny.global_batch:
        assert [sum(load) for load in expected["load"][0].values()][-2:] == [2 * 6 * (tiny.SEQ - depth) for depth in (1, 2)]


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("model", ["qwen3", "deepseek"])
def test_documents_end_what_can_be_predicted(pool, model, depths) -> None:
    flex = with_args(VARIANTS[model], attn_type="flex", attn_mask_type="block_causal")
    run = pool.run(1, _train_fp64, flex, depths, document_batch)[0]
    plain = with_args(VARIANTS[model], attn_mask_type="block_causal")
    assert_equals_reference(run, plain, replace(CLIPPED, mtp_layers=depths, eos_id=EOS), document_batch, tolerance=3e-6)


def test_what_is_further_on() -> None:
    tokens = torch.tensor([[1, 2, EOS, 3, EOS, 4, 5, 6]])
    labels = torch.tensor([[2, EOS, 3, EOS, IGNORED, 5, 6, 8]])
    batch = further_on(MicroBatch(tokens, labels), 1, EOS)
    assert batch.valid_BS.tolist() == [[True, True, False, True, False, True, True, False]]
    assert batch.tokens_BS[batch.valid_BS].tolist() == [2, EOS, EOS, 5, 6]
    assert batch.labels_BS.tolist() == [[EOS, *[IGNORED] * 4, 6, 8, IGNORED]]
    batch = further_on(MicroBatch(tokens, labels, tokens != 2), 2, None)
    assert batch.valid_BS.tolist() == [[True, False, True, True, True, True, False, False]]
    assert batch.labels_BS.tolist() == [[3, IGNORED, IGNORED, 5, 6, 8, IGNORED, IGNORED]]
    assert not further_on(MicroBatch(tokens, labels), 8, None).valid_BS.any()


def _numbers_of(depths: int) -> tuple[float, dict, dict]:
    """Loss of an evaluation, and what it and a training step leave behind."""
    engine = tiny.build(tiny.deepseek(), Layout(), replace(CLIPPED, mtp_layers=depths))
    batches = [tiny.padded_batch(0, 3), tiny.padded_batch(1, 3)]
    before = full_parameters(engine)
    loss = engine.evaluate(batches)
    after = full_parameters(engine)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not any(bias.any() for bias in biases(engine).values())
    result = engine.step(batches, lr=1e-3)
    assert (result.mtp_loss is None) == (depths == 0)
    return loss, result.loss, before


def test_the_model_itself_is_the_same(pool) -> None:
    """Its initial weights, and so its loss, are bit for bit those of a run without; an evaluation speaks of it alone."""
    loss, trained, without = pool.run(1, _numbers_of, 0)[0]
    assert loss == pytest.approx(trained, rel=1e-6)
    other_loss, other_trained, with_two = pool.run(1, _numbers_of, 2)[0]
    assert (other_loss, other_trained) == (loss, trained)
    assert all(np.array_equal(with_two[name], weight) for name, weight in without.items())
    more = with_two.keys() - without.keys()
    kinds = {"enorm", "hnorm", "eh_proj", "mtp_norm", "attention", "attention_norm", "ffn_norm", "moe"}
    assert {name.split(".")[2] for name in more} == kinds
    assert {name.split(".")[:2][1] for name in more if name.startswith("mtp_layers.")} == {"0", "1"}


def _bf16(layout: Layout, dtype: torch.dtype) -> dict:
    return train(tiny.deepseek(), layout, replace(CLIPPED, mtp_layers=2), samples=12, param_dtype=dtype)


def test_bf16_compute_stays_near_fp32(pool) -> None:
    expected = pool.run(1, _bf16, Layout(), torch.float32)[0]
    for layout in (Layout(), Layout(dp_shard=2, tp=2, ep=2), Layout(tp=2, ep=2)):
        run = pool.run(layout.world, _bf16, layout, torch.bfloat16)[0]
        assert relative_error(run["loss"] + run["mtp"], expected["loss"] + expected["mtp"]) < 2e-3
        for name, grad in expected["grads"][0].items():
            assert relative_error(run["grads"][0][name], grad) < 0.1, name


def test_comparison_sees_a_wrong_weight(pool) -> None:
    model = tiny.deepseek()
    options = replace(CLIPPED, mtp_layers=2)
    run = pool.run(1, train, model, Layout(), options, 1, 3)[0]
    batches = [tiny.share(tiny.global_batch(0, 3), 0, 1, 1)]
    wrong = run["initial"] | {"mtp_layers.1.hnorm.weight": run["initial"]["mtp_layers.1.hnorm.weight"] * 1.01}
    errors = errors_of_run(run, train_reference(model, wrong, run["initial_bias"], batches, options))
    assert max(errors.values()) > 1e-4
