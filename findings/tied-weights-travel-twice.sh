#!/usr/bin/env bash
# torch 2.13.0, ray 2.55.1 and flwr 1.42.0: tied weights are two tensors to pickle, to Ray and in a Flower message.
#
# A network that uses one matrix in two layers has it once in its parameters, under two names in its state dict. torch.save
# writes it once, and it is tied again after torch.load. pickle, Ray's object store and Flower's ArrayRecord write it
# twice, and what arrives is no longer tied: a step on one copy leaves the other as it is. Loaded into a tied network the
# name that comes last decides, without a word, if a server has changed the two differently.
#
# Output seen:
#   torch.save: 1.00 times the matrix, tied; pickle: 2.00, not tied; Ray: 2.00, not tied; Flower: 2.00, not tied
#   a tied network loads 1.0 and 2.0 as 2.0
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ray==2.55.1 flwr==1.42.0
FLWR_HOME="$scratch/flwr" FLWR_TELEMETRY_ENABLED=0 RAY_ADDRESS=local RAY_USAGE_STATS_ENABLED=0 timeout 300 \
  "$scratch/venv/bin/python" -W ignore - <<'END'
import io
import pickle

import ray
import torch
from flwr.app import ArrayRecord
from torch import nn


def network():
    layers = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(2)))
    layers[1].weight = layers[0].weight
    return layers


def about(state, size):
    is_tied = state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    return f"{size / state['0.weight'].nbytes:.2f}", is_tied


state = network().state_dict()
file = io.BytesIO()
torch.save(state, file)
size = file.tell()
file.seek(0)
found = {"torch.save": about(torch.load(file), size)}
packed = pickle.dumps(state)
found["pickle"] = about(pickle.loads(packed), len(packed))
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
size = ray._private.worker.global_worker.get_serialization_context().serialize(state).total_bytes
found["Ray"] = about(ray.get(ray.put(state)), size)
ray.shutdown()
record = ArrayRecord(state)
found["Flower"] = about(record.to_torch_state_dict(), sum(len(array.data) for array in record.values()))
words = (f"{name}: {size}, {'tied' if tied else 'not tied'}" for name, (size, tied) in found.items())
print("; ".join(words).replace("1.00,", "1.00 times the matrix,", 1))
assert found == {
    "torch.save": ("1.00", True), "pickle": ("2.00", False), "Ray": ("2.00", False), "Flower": ("2.00", False)
}

tied = network()
tied.load_state_dict({"0.weight": torch.full((500, 500), 1.0), "1.weight": torch.full((500, 500), 2.0)})
loaded = tied[0].weight[0, 0].item()
print(f"a tied network loads 1.0 and 2.0 as {loaded}")
assert loaded == 2.0
END
