#!/usr/bin/env bash
# torch 2.13.0 (CPU): building any optimizer imports torch._dynamo and sympy, which takes about as long as importing torch.
#
# Each process of a simulation pays it: under Ray every worker, in a deployment every client process. The model, its
# gradients and its loss need neither of the two.
#
# Output seen:
#   after a backward pass: _dynamo False, sympy False
#   after SGD(...): _dynamo True, sympy True
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import sys

import torch


def loaded():
    return tuple(name in sys.modules for name in ("torch._dynamo", "sympy"))


layer = torch.nn.Linear(2, 2)
layer(torch.ones(1, 2)).sum().backward()
before = loaded()
torch.optim.SGD(layer.parameters())
after = loaded()
print("after a backward pass: _dynamo {}, sympy {}".format(*before))
print("after SGD(...): _dynamo {}, sympy {}".format(*after))
assert before == (False, False) and after[0]
END
