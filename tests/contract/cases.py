"""The cases of the contract: every method of this package."""

from __future__ import annotations

from typing import Any

from flower_fgl import METHODS
from flower_fgl.testing import MethodCase
from tests.support.methods import collected
from tests.support.short_runs import shortened

__all__ = ["CASES", "UNWEIGHTED", "WEIGHTED"]

# Weight of each term, and a value at which the term shows after two rounds
WEIGHTED: dict[str, dict[str, float]] = {
    **collected("WEIGHTED"),
    "adpfedgnn": {"lambda_mi": 0.3, "lambda_reg": 0.003},
    "f2l": {"contrast_weight": 0.1, "distillation_weight": 0.1},
    "fed-pub": {"l1": 1e-3, "l2": 1e-3},
    "feded": {"distill_weight": 0.1, "suppress_weight": 0.005},
    "fedlog": {"beta": 0.5},
    "fedntd": {"beta": 1.0},
    "fedpg": {"mu": 0.03},
    "fedprox": {"mu": 0.1},
    "fedproto": {"proto_weight": 1.0},
    "fedsage+": {"peer_weight": 0.5},
    "fedtgp": {"proto_weight": 1.0},
    "fggp": {"view_weight": 0.5, "edge_weight": 0.5, "contrast_weight": 0.5},
    "moon": {"mu": 1.0},
    "opfgl": {"alignment_weight": 10.0, "smoothness_weight": 0.1, "beta": 0.2},
}

# Methods whose losses have no weight: where their gradients are tested.
UNWEIGHTED: dict[str, str] = {
    **collected("UNWEIGHTED"),
    "adpfedgnn": "the agent's loss and the estimator's: tests/algorithms/adpfedgnn",
    "clustered-sampling": "cross-entropy only",
    "f2l": "episodes: tests/client_apps/test_f2l.py",
    "fedala": "cross-entropy only, of weights and of W: tests/client_apps/test_fedala.py",
    "fedavg": "cross-entropy only",
    "fedlog": "branches, synthetic nodes, generators: tests/client_apps/test_fedlog*.py",
    "fedpano": "each loss trains its own modules: tests/client_apps/test_fedpano.py",
    "fedper": "cross-entropy only",
    "fedpg": "the server's loss: tests/algorithms/prototypes/test_universal.py",
    "fedrep": "cross-entropy only",
    "fedsage+": "the generator's three terms: tests/algorithms/fedsageplus",
    "fedsem": "cross-entropy only",
    "fedtgp": "the server's loss: tests/algorithms/prototypes/test_universal.py",
    "local": "cross-entropy only",
    "pfedfsl": "cross-entropy of distances only: tests/client_apps/test_pfedfsl.py",
}

# Terms that the short run would leave out
NEEDED: dict[str, dict[str, Any]] = {
    **collected("NEEDED"),
    # the estimator of mutual information knows nothing at first, and its bound is then 0
    "adpfedgnn": {"rounds": 4, "adpfedgnn": {"network_lr": 0.01}},
    # clients lack classes: the distillation is that of absent classes
    "feded": {"synthetic": {"nodes": 120, "classes": 6, "features": 8, "blocks": 6}},
    # a pseudo-graph changes a client's weights by its small learning rates only
    "opfgl": {
        "opfgl": {
            "server_steps": 60,
            "gamma_max": 1.0,
            "lr_global": 1e-2,
            "lr_personal": 1e-2,
        }
    },
}

# The only message of O-pFGL with arrays follows its single round.
DOWNLOAD_ACTIONS: dict[str, str] = {
    **collected("DOWNLOAD_ACTION"),
    "opfgl": "personalise",
}

CASES = [
    MethodCase(
        name,
        short=shortened(name, {}),
        weights=WEIGHTED.get(name, {}),
        needed=NEEDED.get(name, {}),
        download_action=DOWNLOAD_ACTIONS.get(name, ""),
    )
    for name in sorted(METHODS.own)
]
