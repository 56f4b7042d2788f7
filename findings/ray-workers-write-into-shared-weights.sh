#!/usr/bin/env bash
# ray 2.55.1 and torch 2.13.0: a worker that trains weights in place, got as a NumPy array from Ray, changes them for all.
#
# Ray marks arrays of its object store as read-only, and NumPy refuses to write to them. torch.from_numpy takes them with
# a warning only, and a step in place writes into the memory that all processes of the machine map: the next client
# starts from what the last one trained, and the server's own array has changed, too. A tensor put into Ray is copied.
#
# Output seen:
#   the server puts zeros; client 1 trains to 1.0, client 2 starts from 1.0, the server has 1.0
#   the same with a tensor: client 2 starts from 0.0, the server has 0.0
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ray==2.55.1
RAY_ADDRESS=local RAY_USAGE_STATS_ENABLED=0 timeout 300 "$scratch/venv/bin/python" -W ignore - <<'END'
import numpy as np
import ray
import torch

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)


@ray.remote
def train(weights):
    weights = torch.as_tensor(weights)
    start = weights[0].item()
    weights.add_(1.0)  # as optimizers do
    return start, weights[0].item()


shared = ray.put(np.zeros(300_000, dtype=np.float32))  # large arrays are in shared memory
_, trained = ray.get(train.remote(shared))
server = float(ray.get(shared)[0])
start, _ = ray.get(train.remote(shared))
print(f"the server puts zeros; client 1 trains to {trained}, client 2 starts from {start}, the server has {server}")
tensor = ray.put(torch.zeros(300_000))
ray.get(train.remote(tensor))
other, kept = ray.get(train.remote(tensor))[0], ray.get(tensor)[0].item()
print(f"the same with a tensor: client 2 starts from {other}, the server has {kept}")
assert (trained, start, server) == (1.0, 1.0, 1.0)
assert (other, kept) == (0.0, 0.0)
ray.shutdown()
END
