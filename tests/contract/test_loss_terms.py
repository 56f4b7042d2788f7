"""Where each term of each method's losses is shown to have a gradient that is not zero.

A weighted term is tested by the contract: with another weight the trained weights differ,
see ``WEIGHTED`` in :mod:`tests.contract.cases`. The cross-entropy of a model that is
trained by it alone needs no test of its own: a run that learns shows it. Every other term
has a test of its gradient.
"""

# ruff: noqa: E501  (paths of tests)
from __future__ import annotations

import re
from pathlib import Path

import pytest

from flower_fgl import METHODS
from tests.contract.cases import WEIGHTED

TESTS = Path(__file__).parents[1]
PANO = "client_apps/test_fedpano.py::test_each_step_changes_only_its_own_modules"
UNIVERSAL = "algorithms/prototypes/test_universal.py::test_a_class_that_no_client_has"
ADP = "algorithms/adpfedgnn"
SAGE = "algorithms/fedsageplus"
GENERATORS = "algorithms/test_dense.py::test_each_loss_of_the_server_has_a_gradient"
HEADS = "algorithms/test_adafgl.py::test_each_term_has_a_gradient_of_its_own"

TERMS: dict[str, dict[str, str]] = {
    "adafgl": {
        "homophily head, cross-entropy": HEADS,
        "homophily head, distance to the federated predictions": HEADS,
        "raw features, cross-entropy": HEADS,
        "smooth features, cross-entropy": HEADS,
        "signed messages, cross-entropy": HEADS,
    },
    "adpfedgnn": {
        "residuals of the estimator": f"{ADP}/test_mutual_information.py::test_the_residual_loss_is_least",
        "bound of the mutual information": f"{ADP}/test_mutual_information.py::test_the_bound_has_a_gradient",
        "temporal difference of the agent": f"{ADP}/test_dqn.py::test_the_loss_of_the_agent_equals_a_loop",
    },
    "clustered-sampling": {},
    "co-boosting": {
        "cross-entropy of hard nodes": "algorithms/test_coboosting.py::test_hard_nodes_count_more_by_hand",
        "student": GENERATORS,
    },
    "dense": {"cross-entropy of the ensemble": GENERATORS, "student": GENERATORS},
    "f2l": {
        "episodes": "algorithms/test_f2l.py::test_gradients_flow_through_the_steps_of"
    },
    "fed-pub": {
        "cross-entropy under the mask": "client_apps/test_fedpub.py::test_the_data_loss_has_a_gradient"
    },
    "fedala": {
        "cross-entropy of the mixture W": "client_apps/test_fedala.py::test_the_gradient_in_the_step_equals"
    },
    "fedaux": {
        "cross-entropy, direction": "algorithms/test_fedaux.py::test_the_direction_has_a_gradient_unless"
    },
    "fedavg": {},
    "feddc": {
        "correction": "algorithms/test_feddc.py::test_the_penalty_and_its_gradient"
    },
    "feddistill": {},
    "feded": {},
    "fedgcn": {},
    "fedgen": {
        "ensemble and diversity": "algorithms/test_fedgen.py::test_both_losses_reach_the_whole_generator"
    },
    "fedgta": {},
    "fediih": {},
    "fedkd": {
        "both cross-entropies, divergences and hidden vectors": "algorithms/test_fedkd.py::test_each_term_teaches_its_own_network"
    },
    "fedlog": {
        "branches": "algorithms/fedlog/test_branches.py::test_each_branch_gets_a_gradient",
        "step of a client": "client_apps/test_fedlog_loss.py::test_a_step_matches_the_loss_and_gradient",
        "prompts, gradients": "algorithms/fedlog/test_prompts.py::test_prompts_that_are_the_true_neighbours",
        "prompts, features": "algorithms/fedlog/test_prompts.py::test_equation_11_alone_moves_the_prompts",
    },
    "fednh": {
        "cross-entropy of scaled cosines": "algorithms/test_fednh.py::test_logits_are_scaled_cosines_and_train"
    },
    "fedntd": {},
    "fedpano": {
        "both classifiers": PANO,
        "generator": PANO,
        "synthetic nodes": PANO,
    },
    "fedper": {},
    "fedpg": {"the server's contrast": UNIVERSAL},
    "fedproto": {},
    "fedprox": {},
    "fedrep": {},
    "fedsage+": {
        "counts, features, classes": f"{SAGE}/test_generator.py::test_every_part_is_trained",
        "classes, through generated nodes": f"{SAGE}/test_graph_mending.py::test_a_gradient_reaches_the_generated",
        "features of others": "client_apps/test_fedsageplus.py::test_the_gradient_of_a_judge_matches",
    },
    "fedsem": {},
    "fedspray": {
        "encoder, both classifiers, proxies": "algorithms/test_fedspray.py::test_the_loss_reaches_encoder"
    },
    "fedsst": {},
    "fedstar": {
        "cross-entropy, both channels": "algorithms/test_fedstar.py::test_the_loss_reaches_every_parameter"
    },
    "fedtad": {
        "class, discrepancy, diversity of the generator": "algorithms/test_fedtad.py::test_every_term_reaches_the_generator",
        "discrepancy of the model": "algorithms/test_fedtad.py::test_the_discrepancy_trains_the_model",
    },
    "fedtgp": {
        "distances of the server": "algorithms/prototypes/test_universal.py::test_each_class_that_clients_have_gets"
    },
    "fggp": {},
    "fgssl": {},
    "fpl": {},
    "gcfl+": {},
    "local": {},
    "moon": {},
    "opfgl": {
        "both, on the features": "algorithms/opfgl/test_pseudo_graph.py::test_each_loss_alone_has_a_gradient_in_the_features",
        "both, on the links": "algorithms/opfgl/test_pseudo_graph.py::test_each_loss_alone_has_a_gradient_in_the_links",
    },
    "pfedfsl": {
        "cross-entropy of distances": "client_apps/test_pfedfsl.py::test_the_loss_pulls_nodes_to_their"
    },
    "scaffold": {
        "correction": "algorithms/test_scaffold.py::test_the_gradient_of_the_term_is_the"
    },
    "topfgl": {
        "cross-entropy of the learner": "algorithms/test_topfgl.py::test_the_learners_loss_reaches_the_learner"
    },
}  # fmt: skip
"""Terms without a weight, and the test of their gradient; none: cross-entropy only."""


def test_every_method_is_listed() -> None:
    assert set(TERMS) == set(METHODS.own)


@pytest.mark.parametrize("name", [name for name in TERMS if TERMS[name]])
def test_every_term_without_a_weight_has_a_test_of_its_gradient(name: str) -> None:
    for term, test in TERMS[name].items():
        path, _, start = test.partition("::")
        source = (TESTS / path).read_text("utf-8")
        found = re.search(rf"^def {start}.*?(?=^def |\Z)", source, re.M | re.S)
        assert found, (term, test)
        shown = r"backward\(|\.grad\b|autograd\.grad|changed\(|scale > 0"
        assert re.search(shown, found.group()), (term, test)


def test_a_method_without_terms_has_weights_or_the_cross_entropy_alone() -> None:
    alone = {name for name, terms in TERMS.items() if not terms} - set(WEIGHTED)
    # their networks learn by the cross-entropy; what is special is on the server, or in
    # what a client shares
    assert alone == {
        "clustered-sampling", "fedavg", "fedgcn", "fedgta", "fediih", "fedper",
        "fedrep", "fedsem", "fedsst", "gcfl+", "local",
    }  # fmt: skip
