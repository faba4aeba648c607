"""Stock torchtitan 0.2.2 with flavors for the benchmark shapes; torchrun starts it with torchtitan's own arguments.

Two additions, none of which touches what a step does: the peak memory counters keep counting where torchtitan resets
them at every logged step, and the peak of the whole run is printed at the end.
"""

import dataclasses

import torch
from torchtitan.components.metrics import DeviceMemoryMonitor
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.train import Trainer, main

for flavors, flavor in ((qwen3_args, "30B-A3B"), (deepseekv3_args, "16B")):
    for n_layers in (4, 12):
        flavors[f"{flavor}-{n_layers}L"] = dataclasses.replace(flavors[flavor], n_layers=n_layers)

if __name__ == "__main__":
    DeviceMemoryMonitor.reset_peak_stats = lambda self: None
    main(Trainer)
    print(f"peak memory allocated: {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB", flush=True)
