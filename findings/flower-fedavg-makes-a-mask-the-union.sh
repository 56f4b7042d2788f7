#!/usr/bin/env bash
# flwr 1.42.0 (1.41.0 too): FedAvg's mean takes boolean arrays for numbers, and a boolean buffer that is loaded from
# the result is the union of all clients' masks.
#
# The mean of a mask that one of ten clients keeps is 0.1 (float64). load_state_dict copies it into a bool buffer
# without a word, where every number but 0 is True. A pruning mask that each client chose thus keeps every weight
# that any client kept, however few examples that client has.
#
# Output seen:
#   mean of the masks: [0.1, 0.0] float64
#   buffer: [True, False]
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet flwr==1.42.0 torch==2.13.0 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import numpy
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords  # FedAvg's mean

replies = [
    RecordDict({
        "arrays": ArrayRecord({"mask": Array(numpy.array(mask))}),
        "metrics": MetricRecord({"num-examples": examples}),
    })
    for mask, examples in (([True, False], 1), ([False, False], 9))
]
arrays = aggregate_arrayrecords(replies, "num-examples")
mean = arrays["mask"].numpy()
print(f"mean of the masks: {mean.tolist()} {mean.dtype}")
assert mean.tolist() == [0.1, 0.0] and mean.dtype == numpy.float64
layer = torch.nn.Module()
layer.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
layer.load_state_dict(arrays.to_torch_state_dict())
print(f"buffer: {layer.mask.tolist()}")
assert layer.mask.tolist() == [True, False]
END
