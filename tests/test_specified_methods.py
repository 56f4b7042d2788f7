"""Where each hand number and check of the other methods' specifications is a test.

The five methods and the partitions are in ``test_specified_checks.py``. A formula without
a check of its own has the test of its hand numbers, or of a slow loop.
"""

# ruff: noqa: E501  (paths of tests)
from __future__ import annotations

import pytest

from flower_fgl import METHODS
from tests.test_specified_checks import CHECKS as FIVE
from tests.test_specified_checks import require_tests

A = "algorithms/test_"
C = "client_apps/test_"
S = "strategies/test_"
MIX = "algorithms/test_personal_mix.py::test_"
VIEWS = "algorithms/prototypes/test_graph_views.py::test_"
UNIVERSAL = "algorithms/prototypes/test_universal.py::test_"

Checks = list[tuple[str, list[str]]]

MIXTURE: Checks = [
    ("(a) equal descriptors give FedAvg", [f"{MIX}equal_descriptors_and_sizes_as_prior"]),
    ("(b) the identity gives the own upload", [f"{MIX}the_identity_gives_each_client"]),
    ("(c) permuted ids", [f"{MIX}permuting_the_clients_permutes"]),
    ("(d) a constant added to S", [f"{MIX}a_constant_changes_linear_weights"]),
    ("(e) three vectors, scale 1 and 10", [f"{MIX}softmax_rows_and_mixtures_of_three"]),
    ("(f) threshold .7", [f"{MIX}threshold_mixtures_by_hand"]),
    ("a row sum of 0", [f"{MIX}a_row_without_weight_keeps_the_own_model"]),
    ("numbers of a round", [f"{MIX}the_numbers_tell_equal_weights_from_local"]),
    ("absent clients", [f"{S}personal_mix.py::test_an_absent_client_receives"]),
]  # fmt: skip

CHECKS: dict[str, Checks] = {
    "fedaux": [
        ("1: scores, kernel and z of three rows", [f"{A}fedaux.py::test_scores_and_smoothed_embeddings"]),
        ("2: narrow and wide kernels, gradient of a", [
            f"{A}fedaux.py::test_narrow_and_wide_kernels",
            f"{A}fedaux.py::test_the_direction_has_a_gradient_unless",
        ]),
        ("3: the code's cosine", [f"{A}fedaux.py::test_both_kinds_of_score_differ"]),
        ("4: permuted nodes; labels of test nodes", [
            f"{A}fedaux.py::test_the_number_of_parameters_and_permuted",
            f"{C}fedaux.py::test_labels_of_other_nodes_change_no_upload",
        ]),
        ("kernel in row blocks", [f"{A}fedaux.py::test_chunks_give_the_dense_values"]),
    ],
    "topfgl": [
        ("1: degree and Jaccard part", [f"{A}topfgl.py::test_the_degree_and_the_jaccard_part"]),
        ("2: CKA and rows of three clients", [f"{A}topfgl.py::test_cka_is_invariant_to_scale"]),
        ("3: FedAvg's weights without both parts", [f"{C}topfgl.py::test_without_averages_and_edges"]),
        ("4: labels of test nodes", [f"{C}topfgl.py::test_labels_of_other_nodes_change_no_edge"]),
        ("5: number of added edges", [
            f"{A}topfgl.py::test_too_many_edges_lose_the_distant_ones",
            f"{A}topfgl.py::test_drawn_edges_follow_their_distance",
        ]),
        ("6: number of parameters", [f"{A}topfgl.py::test_the_number_of_parameters"]),
    ],
    "fediih": [
        ("1: divergence and similarity", [
            f"{A}fediih.py::test_the_divergence_of_two_gaussians",
            f"{A}fediih.py::test_similarity_and_weights_of_unit_variances",
        ]),
        ("2: one factor", [f"{A}fediih.py::test_one_factor_adds_all_neighbours"]),
        ("3: blocks of factors", [f"{A}fediih.py::test_another_second_factor_leaves"]),
        ("4: number of parameters", [f"{A}fediih.py::test_the_number_of_parameters_on_cora"]),
    ],
    "fedsst": [
        ("the signal of three rows; equal rows", [f"{A}fedsst.py::test_the_signal_by_hand"]),
        ("scores, weights, epochs", [f"{A}fedsst.py::test_the_weights_by_hand"]),
        ("K = 1, equal signals", [f"{A}fedsst.py::test_equal_signals_and_a_single_client"]),
    ],
    "fedgta": [
        ("one and five steps of propagation", [f"{A}fedgta.py::test_one_and_five_steps"]),
        ("five steps with 'add'", [f"{A}fedgta.py::test_the_published_code_adds_to"]),
        ("moments and confidence", [f"{A}fedgta.py::test_moments_and_confidence_of_the_first"]),
    ],
    "fedgcn": [
        ("the path, sums of node 2", [f"{A}fedgcn.py::test_the_path_of_the_specification"]),
        ("2 hops are exact, fewer are not", [f"{A}fedgcn.py::test_two_hops_make_two_layers_exact"]),
        ("K = 1", [f"{A}fedgcn.py::test_one_client_has_the_plain_graph"]),
        ("the masked sum", [f"{S}fedgcn.py::test_masked_sums_give_the_same_scores"]),
        ("no label travels", [f"{S}fedgcn.py::test_no_label_travels"]),
    ],
    "adafgl": [
        ("cosine of Y itself", [f"{A}adafgl.py::test_likeness_is_the_cosine_of"]),
        ("signed weights", [f"{A}adafgl.py::test_signed_weights_by_hand"]),
        ("homophily confidence", [f"{A}adafgl.py::test_the_homophily_is_the_accuracy"]),
        ("without the second step: FedAvg", [f"{C}adafgl.py::test_the_rounds_are_fedavg_s"]),
    ],
    "fedtad": [
        ("reliability .6667", [f"{A}fedtad.py::test_reliability_of_a_node_with_one"]),
        ("sum over clients", [f"{A}fedtad.py::test_reliabilities_are_shares_over"]),
        ("0 epochs: FedAvg", [f"{S}fedtad.py::test_without_server_epochs_the_model"]),
        ("the three losses", [
            f"{A}fedtad.py::test_losses_by_hand",
            f"{A}fedgen.py::test_the_diversity_loss_equals_the_sum",
        ]),
    ],
    "gcfl+": [
        ("distances of four series", [f"{A}gcflplus.py::test_distances_of_four_series"]),
        ("the cut", [f"{A}gcflplus.py::test_the_minimum_cut_by_hand"]),
        ("conditions of a split", [f"{S}gcflplus.py::test_each_condition_can_prevent"]),
    ],
    "fedstar": [
        ("path and triangle", [f"{A}fedstar.py::test_return_probabilities_by_hand"]),
        ("shared part of 3 layers", [f"{A}fedstar.py::test_the_shared_part_has_the_papers_size"]),
    ],
    "fedspray": [
        ("proxies of nodes", [f"{A}fedspray.py::test_proxies_of_nodes_are_mixtures"]),
        ("reliable nodes", [f"{A}fedspray.py::test_reliable_nodes_are_confident"]),
        ("proxies by shares, an absent class", [f"{A}fedspray.py::test_class_proxies_are_weighted"]),
        ("the encoder's loss", [f"{A}fedspray.py::test_the_encoder_loss_by_hand"]),
    ],
    "scaffold": [
        ("gradient and control", [
            f"{A}scaffold.py::test_the_gradient_of_the_term_is_the",
            f"{A}scaffold.py::test_the_new_control_is_the_mean",
        ]),
    ],
    "feddc": [
        ("correction, penalty, averages", [
            f"{A}feddc.py::test_the_correction_is_the_excess",
            f"{A}feddc.py::test_the_penalty_and_its_gradient",
            f"{S}feddc.py::test_weights_count_by_size_and_changes",
        ]),
    ],
    "fednh": [
        ("first prototypes", [f"{A}fednh.py::test_few_classes_get_orthogonal"]),
        ("normalised means in the upload", [f"{A}fednh.py::test_class_means_are_directions"]),
        ("moving average", [f"{A}fednh.py::test_prototypes_move_towards_the_weighted"]),
    ],
    "fpl": [
        ("positives inside the logarithm", [f"{A}fpl.py::test_positives_are_summed_inside"]),
        ("mean of the clusters", [f"{A}fpl.py::test_the_unbiased_prototype_is_the_mean"]),
        ("FINCH", ["algorithms/prototypes/test_finch.py::test_levels_by_hand"]),
        ("round 1: cross-entropy alone", [f"{C}fpl.py::test_the_loss_of_round_1"]),
    ],
    "fgssl": [
        ("contrast", [f"{A}fgssl.py::test_the_contrast_by_hand", f"{A}fgssl.py::test_the_contrast_against_a_loop"]),
        ("edges", [f"{A}fgssl.py::test_edges_that_are_alike_cost_nothing"]),
    ],
    "dense": [
        ("ensemble", [f"{A}dense.py::test_the_ensemble_by_hand"]),
        ("KL where both differ only", [f"{A}dense.py::test_only_nodes_with_another_prediction"]),
        ("student", [f"{A}dense.py::test_the_students_loss_by_hand"]),
        ("new weights each epoch", [f"{A}dense.py::test_a_new_draw_replaces_all_weights"]),
    ],
    "co-boosting": [
        ("hard nodes, p detached", [f"{A}coboosting.py::test_hard_nodes_count_more_by_hand"]),
        ("perturbation", [f"{A}coboosting.py::test_a_perturbation_has_its_length"]),
        ("weights of clients", [f"{A}coboosting.py::test_a_client_that_is_right_gains"]),
        ("disagreement on all nodes, τ = 3", [f"{A}coboosting.py::test_nodes_with_equal_predictions_count"]),
    ],
    "fedkd": [
        ("energy .95 to .98", [f"{A}fedkd.py::test_the_energy_rises_linearly"]),
        ("rank, full rank", [f"{A}fedkd.py::test_the_rank_by_hand", f"{A}fedkd.py::test_factors_keep_the_energy"]),
        ("losses", [f"{A}fedkd.py::test_the_losses_by_hand"]),
        ("gradients of norm 10 at most", [f"{C}fedkd.py::test_teacher_student_and_projection_each"]),
        ("plain mean, energy of the round down", [
            f"{S}fedkd.py::test_clients_with_more_nodes_do_not",
            f"{S}fedkd.py::test_each_download_keeps_the_energy",
        ]),
    ],
    "fedgen": [
        ("shares, ensemble, diversity, divergence", [
            f"{A}fedgen.py::test_shares_of_the_classes_by_hand",
            f"{A}fedgen.py::test_the_ensembles_loss_by_hand",
            f"{A}fedgen.py::test_the_diversity_loss_by_hand",
            f"{A}fedgen.py::test_the_divergence_by_hand",
        ]),
        ("classes by count, uniform, or none before training", [
            f"{S}fedgen.py::test_classes_are_drawn_by_the_training_nodes",
            f"{S}fedgen.py::test_classes_are_drawn_equally_often",
            f"{S}fedgen.py::test_no_class_is_drawn_before",
        ]),
        ("generator in evaluation mode on clients", [f"{A}fedgen.py::test_a_client_generates_each_row_apart"]),
    ],
    "feddistill": [
        ("term; probabilities, not logits", [
            f"{A}feddistill.py::test_the_term_by_hand",
            f"{A}feddistill.py::test_mean_logits_are_not_read_as",
        ]),
        ("owners count equally, last epoch", [
            f"{A}feddistill.py::test_owners_of_a_class_count_equally",
            f"{A}feddistill.py::test_the_upload_averages_each_training_node",
        ]),
    ],
    "moon": [("contrast", [f"{C}moon.py::test_the_contrast_by_hand"])],
    "fedper": [("body averaged, head private", [f"{C}fedper.py::test_two_bodies_are_averaged"])],
    "fedrep": [("head, then body", [f"{C}fedper.py::test_fedrep_trains_head_and_body"])],
    "fedala": [
        ("mixture and its step", [f"{C}fedala.py::test_the_blend_and_a_step_of_it_by_hand"]),
        ("first to convergence, then once", [f"{C}fedala.py::test_the_blend_weights_are_learned_to"]),
    ],
    "fedproto": [
        ("mean by counts", [f"{UNIVERSAL}fedproto_weights_by_count_and_omits"]),
        ("class distance", [f"{C}fedpg.py::test_class_distance_sums_the_means"]),
    ],
    "fedtgp": [
        ("distances with margin", [f"{UNIVERSAL}fedtgp_classifies_uploads_by_distance"]),
        ("margin", [f"{UNIVERSAL}the_spread_is_the_largest_distance"]),
    ],
    "fggp": [
        ("prototypes", [f"{VIEWS}prototypes_by_hand"]),
        ("contrast of views", [f"{VIEWS}the_contrast_of_the_views_by_hand"]),
        ("edges", [f"{VIEWS}the_edge_loss_by_hand", f"{VIEWS}edges_are_drawn_with_the_predicted"]),
        ("clusters of each class", [f"{S}fggp.py::test_each_class_is_clustered_separately"]),
    ],
    "fedsage+": [
        ("sum of three terms", ["algorithms/fedsageplus/test_generator.py::test_the_loss_is_the_sum_of_three"]),
        ("feature loss", ["algorithms/fedsageplus/test_generator.py::test_the_feature_loss_of_two_vectors"]),
        ("gradient of others", [f"{C}fedsageplus.py::test_the_gradient_of_a_judge_matches"]),
    ],
    "fed-pub": [
        ("softmax of cosines", [f"{S}fedpub.py::test_the_attention_is_a_softmax_of_cosines"]),
        ("penalties", [f"{C}fedpub.py::test_the_penalty_of_three_weights_by_hand"]),
        ("pruned below λ_1", [f"{C}fedpub.py::test_small_entries_are_pruned"]),
        ("proxy graph", [f"{S}fedpub.py::test_the_proxy_graph_has_five_unconnected"]),
    ],
    "fedntd": [
        ("without the true class", [f"{C}fedntd.py::test_the_true_class_is_left_out"]),
        ("τ²", [f"{C}fedntd.py::test_the_temperature_divides_the_logits"]),
    ],
    "feded": [
        ("prior", [f"{C}feded.py::test_the_prior_shifts_the_logits"]),
        ("absent classes only", [f"{C}feded.py::test_distillation_is_restricted_to_the"]),
        ("suppression", [f"{C}feded.py::test_suppression_of_two_nodes_by_hand"]),
    ],
    "pfedfsl": [
        ("distances to class means", [f"{C}pfedfsl.py::test_logits_are_minus_ten_distances"]),
        ("weights softmax(−loss)", [f"{C}pfedfsl.py::test_models_are_weighted_by_the_softmax"]),
    ],
    "f2l": [
        ("attention over the support set", [f"{A}f2l.py::test_attention_mixes_the_values"]),
        ("step of adaptation", [f"{A}f2l.py::test_a_step_of_adaptation_is_a_gradient_step"]),
        ("both links", [
            f"{A}f2l.py::test_contrast_compares_a_node_with_the_other",
            f"{A}f2l.py::test_distillation_is_the_divergence_over",
        ]),
    ],
    "clustered-sampling": [
        ("algorithms 1 and 2", [
            f"{S}clusteredsampling.py::test_clusters_by_size_by_hand",
            f"{S}clusteredsampling.py::test_clusters_of_similar_updates_by_hand",
        ]),
        ("Σ_k r_k(i) = M·n_i/n", [f"{S}clusteredsampling.py::test_the_draws_are_unbiased"]),
    ],
    "fedsem": [
        ("both steps", [f"{S}fedsem.py::test_both_steps_by_hand"]),
        ("Q = 1: FedAvg", [f"{S}fedsem.py::test_one_centre_equals_fedavg"]),
    ],
}  # fmt: skip
"""What each check says in short, and its tests."""

PLAIN = {"local", "fedavg", "fedprox"}
"""Methods without an equation of their own file; see ``tests/contract``."""


def test_every_method_is_listed() -> None:
    assert set(CHECKS) | set(FIVE) - {"partitions"} | PLAIN == set(METHODS.own)


def test_the_shared_mixture_keeps_its_checks() -> None:
    require_tests("mixture", MIXTURE)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_of_a_method_is_a_test(name: str) -> None:
    require_tests(name, CHECKS[name])
