"""Our models against torchtitan's own: state dict, outputs and gradients, and attention that stays within documents."""

import copy
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
from layout_runs import full, relative_error
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.model import BaseModelArgs

from moe_titan.data import MicroBatch
from moe_titan.engine import Engine
from moe_titan.layers.attention import DocumentAttention
from moe_titan.models import MODELS, attention_masks, build_model
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import logical_tensors

FLAVORS = {"llama3": llama3_args, "qwen3": qwen3_args, "deepseek_v3": deepseekv3_args}
EOS = 39


def llama3() -> tuple[str, TransformerModelArgs]:
    return "llama3", TransformerModelArgs(
        vocab_size=tiny.VOCAB, max_seq_len=tiny.SEQ, dim=32, n_layers=2, n_heads=4, n_kv_heads=2
    )


def changed(args: BaseModelArgs, **changes) -> BaseModelArgs:
    args = copy.copy(args)
    for key, value in changes.items():
        setattr(args, key, value)
    return args


def with_attention(model, attn_type: str, mask: str) -> tuple[str, BaseModelArgs]:
    name, args = model
    return name, changed(args, attn_type=attn_type, attn_mask_type=mask)


@pytest.mark.parametrize(("name", "flavor"), [(name, flavor) for name, flavors in FLAVORS.items() for flavor in flavors])
def test_state_dict_is_torchtitans(name, flavor) -> None:
    args = changed(FLAVORS[name][flavor], moe_impl="standard")
    with torch.device("meta"):
        expected = MODELS[name](args).state_dict()
    ours = {
        logical: part
        for key, entry in build_model(name, args).state_dict().items()
        for logical, part in logical_tensors(key, entry)
    }
    assert {key: (entry.shape, entry.dtype) for key, entry in ours.items()} == {
        key: (entry.shape, entry.dtype) for key, entry in expected.items()
    }


def count_experts(values: Tensor, bins: int, min: int, max: int) -> Tensor:
    """torch.histc, which does not take integers on the CPU."""
    return torch.bincount(values, minlength=bins)


def torchtitan_model(engine: Engine, name: str) -> nn.Module:
    """torchtitan's model of the same arguments and with the engine's weights."""
    args = engine.args
    if getattr(args, "moe_args", None) is not None:
        args = changed(args, moe_args=replace(args.moe_args, use_grouped_mm=False))
    model = MODELS[name](args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        parameters = dict(model.named_parameters())
        for stored, parameter in engine.model.named_parameters():
            for logical, part in logical_tensors(stored, parameter.detach()):
                parameters.pop(logical).copy_(torch.from_numpy(full(part)))
        assert not parameters
        for key, buffer in model.named_buffers():
            if key.endswith("expert_bias"):
                buffer.copy_(engine.model.get_buffer(key))
    return model


def compare_with_torchtitan(model) -> tuple[float, dict[str, float], float]:
    """Relative errors of the logits and of every gradient; and how far another expert bias moves the logits."""
    engine, name = tiny.build(model, Layout()), model[0]
    for key, parameter in engine.model.named_parameters():
        if ".experts." in key:  # so that they matter beside the residual stream
            parameter.detach().mul_(10)
    biases = [buffer for key, buffer in engine.model.named_buffers() if key.endswith("expert_bias")]
    for bias in biases:
        bias.copy_(torch.rand(len(bias)) * 0.1)
    peer = torchtitan_model(engine, name)
    tokens = torch.randint(0, tiny.VOCAB, (3, tiny.SEQ))
    direction = torch.randn(3, tiny.SEQ, tiny.VOCAB)
    masks = attention_masks(engine.args, tokens, EOS)
    logits = engine.model(tokens, attention_masks=masks)
    (logits * direction).sum().backward()
    with patch("torch.histc", count_experts):
        expected = peer(tokens)
        (expected * direction).sum().backward()
    grads = {key: parameter.grad for key, parameter in peer.named_parameters()}
    errors = {
        logical: relative_error(full(part), grads[logical].numpy())
        for stored, parameter in engine.model.named_parameters()
        for logical, part in logical_tensors(stored, parameter.grad)
    }
    error = relative_error(logits.detach().numpy(), expected.detach().numpy())
    for bias in biases:
        bias.copy_(torch.rand(len(bias)))
    moved = engine.model(tokens, attention_masks=masks)
    return error, errors, relative_error(moved.detach().numpy(), expected.detach().numpy())


PEERS = {
    "qwen3": tiny.qwen3(),
    "qwen3 sigmoid": tiny.qwen3(score_func="sigmoid", route_norm=False, route_scale=2.0),
    "deepseek": tiny.deepseek(),
    "deepseek groups": tiny.deepseek(
        num_experts=8, num_expert_groups=4, num_limited_groups=2, num_shared_experts=2, score_func="softmax", gate_bias=True
    ),
    "llama3": llama3(),
}


@pytest.mark.parametrize("model", PEERS)
def test_outputs_and_gradients_are_torchtitans(pool, model) -> None:
    [(error, errors, moved)] = pool.run(1, compare_with_torchtitan, PEERS[model])
    assert error <= 1e-5
    assert max(errors.values()) <= 1e-5, errors
    assert (moved > 1e-3) == (model != "llama3")


def logits_of_documents(model) -> dict[str, np.ndarray]:
    """Logits of a row of two documents, of the row with another first document, and of the second document alone."""
    engine = tiny.build(model, Layout())
    tokens = torch.randint(0, EOS, (2, tiny.SEQ))
    tokens[0, 9] = tokens[1, 5] = EOS
    other = tokens.clone()
    other[0, :9] = (other[0, :9] + 1) % EOS
    rows = {"packed": tokens, "other first": other, "alone": tokens[:1, 10:]}
    logits = {}
    for name, tokens_BS in rows.items():
        batch = MicroBatch(tokens_BS, tokens_BS)
        with torch.no_grad():
            masks = attention_masks(engine.args, batch.tokens_BS, EOS)
            logits[name] = engine.model(batch.tokens_BS, attention_masks=masks).numpy()
    return logits


def deepseek_on_long_sequences() -> tuple[str, BaseModelArgs]:
    """Longer than it was made for: attention is scaled otherwise."""
    name, args = tiny.deepseek()
    return name, changed(args, original_seq_len=tiny.SEQ // 2)


@pytest.mark.parametrize("model", [tiny.qwen3(), deepseek_on_long_sequences(), llama3()], ids=lambda model: model[0])
def test_documents_do_not_attend_to_each_other(pool, model) -> None:
    [logits] = pool.run(1, logits_of_documents, with_attention(model, "flex", "block_causal"))
    packed, other = logits["packed"], logits["other first"]
    np.testing.assert_array_equal(other[0, 10:], packed[0, 10:])
    assert (other[0, :10] != packed[0, :10]).any(axis=-1).all()
    # Rotary positions count within the row, but only their differences matter.
    assert relative_error(packed[0, 10:], logits["alone"][0]) <= 1e-5

    [logits] = pool.run(1, logits_of_documents, with_attention(model, "flex", "causal"))
    assert (logits["other first"][0, 10:] != logits["packed"][0, 10:]).any(axis=-1).all()
    [plain] = pool.run(1, logits_of_documents, with_attention(model, "sdpa", "causal"))
    assert relative_error(logits["packed"], plain["packed"]) <= 1e-5


def compiled_attention(model) -> tuple[int, float]:
    """Graphs of one block's attention compiled whole, for five batches of other documents each; its worst error beside eager."""
    engine, graphs, errors = tiny.build(model, Layout()), [], []
    block = engine.model.layers["0"]

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(block.attention.forward, backend=backend, fullgraph=True)
    rope = engine.model.freqs_cis if hasattr(engine.model, "freqs_cis") else engine.model.rope_cache
    for _ in range(5):
        tokens_BS = torch.randint(0, 6, (3, tiny.SEQ))
        masks = attention_masks(engine.args, tokens_BS, 0)
        x_BSD = torch.randn(3, tiny.SEQ, engine.args.dim, requires_grad=True)
        out, expected = (forward(x_BSD, rope, masks, None) for forward in (compiled, block.attention.forward))
        grads = [torch.autograd.grad(y, x_BSD, torch.ones_like(y))[0] for y in (out, expected)]
        errors += [relative_error(a.detach().numpy(), b.detach().numpy()) for a, b in ((out, expected), grads)]
    return len(graphs), max(errors)


@pytest.mark.parametrize("model", [tiny.qwen3(), tiny.deepseek(), llama3()], ids=lambda model: model[0])
def test_documents_do_not_recompile(pool, model) -> None:
    [(graphs, error)] = pool.run(1, compiled_attention, with_attention(model, "flex", "block_causal"))
    assert graphs == 1 and error <= 1e-6


@pytest.mark.parametrize(
    ("name", "flavor"), [("qwen3", "debugmodel_moe"), ("deepseek_v3", "16B"), ("llama3", "debugmodel_flex_attn")]
)
def test_flex_attention_is_ours(name, flavor) -> None:
    model = build_model(name, changed(FLAVORS[name][flavor], moe_impl="standard", attn_type="flex"))
    assert all(type(block.attention.inner_attention) is DocumentAttention for block in model.layers.values())
