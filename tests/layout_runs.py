"""What the layout tests run on every rank, and how two runs are compared."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import build, global_batch, padded_batch, share
from torch.distributed.tensor import DTensor, Replicate

from moe_titan.data import MicroBatch
from moe_titan.engine import Engine, TrainOptions
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import like, local, logical_tensors
from parallelisms.split_weights import Split

# A norm that clipping acts on: the tiny models' gradients have norms of about 0.5.
CLIPPED = TrainOptions(max_norm=0.2)


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True).numpy()  # numpy has no bf16


def full_parameters(engine: Engine) -> dict[str, np.ndarray]:
    """Whole parameters under torchtitan's names."""
    return {logical: full(part) for name, master in whole_masters(engine) for logical, part in logical_tensors(name, master)}


def whole_masters(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters in their full precision; of split ones copies."""
    for name, master in engine.optimizer.masters().items():
        yield name, like(master.join(), master.high) if isinstance(master, Split) else master


def full_gradients(engine: Engine) -> dict[str, np.ndarray]:
    """Whole gradients under torchtitan's names, zero where a parameter has none on this rank."""
    grads = {}
    for name, parameter in engine.model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grads |= {logical: full(part) for logical, part in logical_tensors(name, grad.detach())}
    return grads


def biases(engine: Engine) -> dict[str, np.ndarray]:
    return {name: b.numpy().copy() for name, b in engine.model.named_buffers() if name.endswith("expert_bias")}


def train(
    model,
    layout: Layout,
    options: TrainOptions = CLIPPED,
    steps: int = 3,
    samples: int = 24,
    local_batch: int = 3,
    make_batch: Callable = global_batch,
    tweak: Callable[[Engine], None] | None = None,
    **parallel,
) -> dict[str, Any]:
    """Trains a few steps. Rank 0 returns losses, norms, loads, gradients and parameters; all ranks digests of their shards."""
    engine = build(model, layout, options, **parallel)
    if tweak is not None:
        tweak(engine)
    out: dict[str, Any] = {"initial": full_parameters(engine), "initial_bias": biases(engine)}
    out |= {"loss": [], "norm": [], "tokens": [], "balance": [], "mtp": [], "load": []}
    grads: dict[int, dict[str, np.ndarray]] = {}
    update = engine.optimizer.step

    def recording_step(lr, max_norm):
        found = full_gradients(engine)
        done = update(lr, max_norm)
        grads[done.number] = found  # a step that is repeated has the same number
        return done

    engine.optimizer.step = recording_step
    for step in range(steps):
        batches = share(make_batch(step, samples), engine.mesh.data_rank, layout.dp, samples // (layout.dp * local_batch))
        result = engine.step(batches, lr=1e-3)
        out["loss"].append(result.loss)
        out["norm"].append(result.grad_norm)
        out["tokens"].append(result.tokens)
        out["balance"].append(result.balance_loss)
        out["mtp"].append(result.mtp_loss)
        out["load"].append({layer: load.tolist() for layer, load in result.expert_load.items()})
    out["grads"] = list(grads.values())
    out["params"] = full_parameters(engine)
    out["bias"] = biases(engine)
    digests = shard_digests(engine)
    return out | {"digests": digests} if dist.get_rank() == 0 else {"digests": digests}


def _batch_without_recompilation(step: int, samples: int) -> MicroBatch:
    # Token counts per expert differ from step to step: after the first every compilation is one too many.
    torch._dynamo.config.error_on_recompile = step > 0
    return padded_batch(step, samples)


def train_counting_graphs(model, layout: Layout, options: TrainOptions, steps: int, **parallel) -> dict[str, Any]:
    """Trains on batches of changing loads, fails when anything is compiled after the first, and adds the number of graphs."""
    run = train(model, layout, options, steps, samples=6, make_batch=_batch_without_recompilation, **parallel)
    return run | {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def shard_digests(engine: Engine) -> dict[tuple, str]:
    """Hashes of what this rank holds; the same key on two ranks means that they are replicas of each other."""
    held = {("parameter", name): master for name, master in whole_masters(engine)}
    held |= {(moment, name): tensor for name, moment, tensor in engine.optimizer.moments()}
    digests = {(*key, _place(t)): _digest(local(t)) for key, t in held.items()}
    return digests | {("bias", name): _digest(torch.from_numpy(b)) for name, b in biases(engine).items()}


def _place(tensor: torch.Tensor) -> tuple:
    """This rank's coordinates in those mesh dimensions that cut the tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return tuple(None if isinstance(placement, Replicate) else at for at, placement in coordinates)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| in the 2-norm; where nothing is expected, 0 if there is nothing and infinite else."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape
    error, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    if not np.isfinite(error):
        return float("inf")
    return float(error / size) if size else (0.0 if error == 0 else float("inf"))


def errors_of_run(actual: dict, expected: dict) -> dict[str, float]:
    """Relative error of every number of a run, expert weights expert by expert."""
    errors = {}
    for key in ("loss", "norm", "balance", "mtp"):
        for step, pair in enumerate(zip(actual[key], expected[key], strict=True)):
            if pair != (None, None):
                errors[f"{key} of step {step}"] = relative_error(*pair)
    tensors = [(f"gradient of step {step}", a, e) for step, (a, e) in enumerate(_zip(actual, expected, "grads"))]
    for what, a, e in [*tensors, ("parameter", actual["params"], expected["params"])]:
        assert a.keys() == e.keys()
        for name in e:
            if ".experts." in name:
                for expert in range(len(e[name])):
                    errors[f"{what} {name}[{expert}]"] = relative_error(a[name][expert], e[name][expert])
            else:
                errors[f"{what} {name}"] = relative_error(a[name], e[name])
    return errors


def _zip(actual: dict, expected: dict, key: str):
    return zip(actual[key], expected[key], strict=True)


def assert_same_run(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert actual["tokens"] == expected["tokens"]
    assert actual["load"] == expected["load"]
    errors = errors_of_run(actual, expected)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"{len(wrong)} of {len(errors)} numbers differ: {dict(list(wrong.items())[:8])}"
    for name, bias in expected["bias"].items():
        # Against the reference, which adds in fp64, to rounding; between layouts exactly.
        rounding = 0 if bias.dtype == np.float32 else 1e-6
        np.testing.assert_allclose(actual["bias"][name], bias, rtol=rounding, atol=rounding / 10)


def assert_bitwise_replicas(ranks: list[dict]) -> None:
    seen: dict[tuple, str] = {}
    for rank, result in enumerate(ranks):
        for key, digest in result["digests"].items():
            assert seen.setdefault(key, digest) == digest, f"rank {rank} holds another {key} than its replicas"
