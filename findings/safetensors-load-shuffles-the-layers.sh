#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.13.0 and flwr 1.42.0: safetensors.torch.load returns the tensors of the same bytes in another
# order at every call, also within one process; load_file of the same content has one order, that of the names.
#
# A state dict loses the order of its layers. load_state_dict goes by name and is safe. What goes by place is not: the list
# of arrays that Flower's ArrayRecord takes and gives, a model as one vector, a mean over zip(*clients). Clients that
# load the same bytes send one model in many orders: their mean mixes layers of equal shape without a word.
#
# Output seen:
#   20 calls of load: more than one order; 20 calls of load_file: one order
#   mean of 20 clients with the same model, by place: differs from the model; by name: equal
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 flwr==1.42.0
FLWR_HOME="$scratch/flwr" FLWR_TELEMETRY_ENABLED=0 SCRATCH="$scratch" timeout 300 \
  "$scratch/venv/bin/python" -W ignore - <<'END'
import os

import torch
from flwr.app import ArrayRecord
from safetensors.torch import load, load_file, save, save_file
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(12)))
state = network.state_dict()
packed, path = save(state), os.environ["SCRATCH"] + "/model.safetensors"
save_file(state, path)

orders = {tuple(load(packed)) for _ in range(20)}
files = {tuple(load_file(path)) for _ in range(20)}
assert all(set(order) == set(state) for order in orders | files)
assert len(files) == 1 and files.pop() == tuple(sorted(state))
assert len(orders) > 1, "the order is fixed now"
print("20 calls of load: more than one order; 20 calls of load_file: one order")


def uploaded():
    """Return a client's reply: the layers as a list, as many strategies average them."""
    layers = [tensor.numpy() for tensor in load(packed).values()]
    return ArrayRecord(layers).to_numpy_ndarrays()


names, clients = list(state), [uploaded() for _ in range(20)]
means = [torch.tensor(sum(place) / 20) for place in zip(*clients)]
same = [torch.allclose(mean, state[name]) for mean, name in zip(means, names)]
own = [load(packed) for _ in range(2)]
assert not all(same)
assert all(torch.equal((own[0][n] + own[1][n]) / 2, state[n]) for n in names)
print("mean of 20 clients with the same model, by place: differs from the model; by name: equal")
END
