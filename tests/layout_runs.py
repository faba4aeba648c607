"""What the layout tests run on every rank."""

from tiny import build, global_batch, share
from torch.distributed.tensor import DTensor

from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import logical_tensors


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    model,
    layout: Layout,
    steps=3,
    samples=12,
    seq=24,
    local_batch=3,
    padded=False,
    train_options=None,
    tweak=None,
    **parallel,
):
    """Trains a few steps; returns losses, norms, loads, each step's full gradients and the final full parameters and biases."""
    engine = build(model, layout, train_options, **parallel)
    if tweak is not None:
        tweak(engine)
    out = {"loss": [], "norm": [], "load": [], "grads": []}
    update = engine.optimizer.step

    def recording_step(lr, max_norm):
        out["grads"].append(
            {
                logical: full(part)
                for name, p in engine.model.named_parameters()
                for logical, part in logical_tensors(name, p.grad)
            }
        )
        return update(lr, max_norm)

    engine.optimizer.step = recording_step
    accumulate = samples // (layout.dp * local_batch)
    for step in range(steps):
        batches = share(global_batch(step, samples, seq, padded), engine.mesh.data_rank, layout.dp, accumulate)
        result = engine.step(batches, lr=1e-3)
        out["loss"].append(result.loss)
        out["norm"].append(result.grad_norm)
        out["load"].append({k: v.tolist() for k, v in result.expert_load.items()})
    out["params"] = {
        logical: full(part) for name, p in engine.model.named_parameters() for logical, part in logical_tensors(name, p)
    }
    out["bias"] = {name: buffer.clone() for name, buffer in engine.model.named_buffers() if "expert_bias" in name}
    out["shards"] = {
        name: (tuple(p.placements), p.device_mesh.get_coordinate(), p.to_local().detach().clone())
        for name, p in engine.model.named_parameters()
    }
    return out
