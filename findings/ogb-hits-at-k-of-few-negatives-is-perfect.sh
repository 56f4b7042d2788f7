#!/usr/bin/env bash
# ogb 1.3.6: Hits@K is 1.0 for any scores if there are fewer than K negative pairs.
#
# The evaluator of ogbl-collab (K = 50) returns 1.0 for 49 negatives that all score higher than all positives, and
# 0.0 for 50. An owner of a small part of a graph, which has few test pairs, therefore looks perfect, and an average
# over owners rises with the number of small owners.
#
# Output seen:
#   49 negatives, all above the positives: 1.0
#   50 negatives, all above the positives: 0.0
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ogb==1.3.6
"$scratch/venv/bin/python" - <<'END'
import builtins

import torch

builtins.input = lambda *_: "n"  # ogb asks whether to update
from ogb.linkproppred import Evaluator

for number, expected in ((49, 1.0), (50, 0.0)):
    scores = {"y_pred_pos": torch.zeros(10), "y_pred_neg": torch.ones(number)}
    found = float(Evaluator("ogbl-collab").eval(scores)["hits@50"])
    print(f"{number} negatives, all above the positives: {found}")
    assert found == expected
END
