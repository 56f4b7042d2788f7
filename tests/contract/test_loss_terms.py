"""Every term of a method's loss has a gradient that changes the trained weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import METHODS, simulate
from flower_fgl.client_apps.base import FglClientApp
from tests.support.methods import collected
from tests.support.short_runs import shortened

# Weight of each term, and a value at which the term shows after two rounds. The run is
# repeated with twice the value: both draw the same random numbers, so different weights
# of the model mean a gradient that is not zero.
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
    "adpfedgnn": {"rounds": 4, "adpfedgnn": {"network_lr": 0.01, "overlap": "allowed"}},
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


def test_every_method_is_listed() -> None:
    assert set(WEIGHTED) | set(UNWEIGHTED) == set(METHODS)


def trained_weights(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Run a method; return the weights that each client trained in each round."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    original = FglClientApp.pack_fit

    def pack_fit(self: Any, *args: Any) -> Any:
        _, _, (client, _), server_round, _, result, *_ = args
        if result.model is not None:
            weights = result.model.state_dict()
            found[server_round, client.partition_id] = {
                name: tensor.detach().clone() for name, tensor in weights.items()
            }
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FglClientApp, "pack_fit", pack_fit)
        run = simulate(method, stacked="false", **settings)
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)
    assert found
    return found


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method, row in WEIGHTED.items() for name in row],
)
def test_a_term_with_a_weight_has_a_gradient(
    method: str, name: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dropout": 0.0, **shortened(method, small), **NEEDED.get(method, {})}
    runs = []
    for factor in (1, 2):
        own = {**settings.get(method, {}), name: factor * WEIGHTED[method][name]}
        runs.append(trained_weights(method, {**settings, method: own}, monkeypatch))
    once, twice = runs
    assert once.keys() == twice.keys()
    most = max(
        float((weight - twice[key][part]).abs().max())
        for key, state in once.items()
        for part, weight in state.items()
        if weight.is_floating_point() and weight.numel()
    )
    # rounding alone leaves less than 1e-6 of weights near 1
    assert most > 1e-5


@pytest.mark.parametrize("method", ["fedavg", "fedpg"])
def test_runs_with_equal_weights_train_equal_models(
    method: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dropout": 0.0, **shortened(method, small)}
    first, second = (trained_weights(method, settings, monkeypatch) for _ in range(2))
    for key, state in first.items():
        for name, weight in state.items():
            assert torch.equal(weight, second[key][name])
