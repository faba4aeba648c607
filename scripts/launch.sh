#!/usr/bin/env bash
# Trains train_configs/debug.toml on every visible GPU, or in 4 CPU processes where there is none.
# Arguments are passed on to train.py, after the layout chosen here, so that they win over it.
set -euo pipefail
cd "$(dirname "$0")/.."

gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
  processes=4
  layout=() # the file's own: tp 2 x dp_shard 2, ep 4
else
  processes=$gpus
  # One expert group over all GPUs where that divides the 16 experts of debug.toml.
  ep=$((16 % gpus == 0 ? gpus : 1))
  layout=(
    --parallelism.tensor_parallel_degree 1
    --parallelism.data_parallel_shard_degree -1
    --parallelism.expert_parallel_degree "$ep"
  )
fi

threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
exec .venv/bin/torchrun --standalone --nproc-per-node="$processes" \
  train.py --config train_configs/debug.toml "${layout[@]}" "$@"
