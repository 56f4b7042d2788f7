"""Client half of FedPANO: shared representation, own classifier, synthetic nodes.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
θ_i^g, θ_i^s                     ``Parts.shared.encoder``, ``.classifier``
φ_i                              ``Parts.generator``
θ_i^c                            ``Parts.own``, kept in the client's state
V_i in the losses                ``client.data.training``: the training nodes
Y_i                              ``Parts.classes``: those of the training nodes
h_u                              rows of ``Trainer.represent``
m, ε                             ``fedpano.m``, ``Trainer.draw_noise``
===============================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.client_apps.fedpano.training import (
    DescendingTrainer,
    Trainer,
    assemble_modules,
    build_parts,
    split_personal,
    stack_modules,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    terms_of_clients,
)
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedPANOClientApp"]

Client = AnyClient[FedPANOSettings]

LOSSES = ("generic", "own", "generator", "synthetic")
"""L^s, L^c, L^g and L^ĉ of Eq. (9)."""


class FedPANOClientApp(GroupClientApp):
    """Train the shared parts and the client's own classifier, with synthetic nodes.

    Notes
    -----
    1. Each of the four losses is minimised in turn over its own modules, as in
       Algorithm 1, and not as the sum of Eq. (9). In that sum L^g would be smallest if
       all nodes had the same representation.
    2. Steps 6 and 7 use the representations from which step 5 of the next epoch starts:
       the graph network does not change in between.
    3. Own classifiers start from the same weights for the same class on all clients, as
       the heads of FedPer and FedRep do. In the paper each client draws its own. Such
       classifiers pull the averaged encoders apart, most of all in variant nS.
    4. A client without training nodes has no classifier of its own and predicts with the
       generic one; in variant nS with an untrained one.
    5. One pass computes the representations of training nodes and their neighbours. A
       pass with gradient over the training nodes and one without over the rest is slower
       on CS.
    """

    stacked = True
    down = Weights
    up = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parts that the variant shares."""
        return client.cached(
            ("shared parts",), lambda: state_shapes(build_parts(client).shared)
        )

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients with dropout or moments, or on a part of a graph."""
        config = client.config
        if config.dropout:
            return "fedpano draws dropout for a part of the graph"
        if config.optimizer != "sgd" and config.optimizer_state == "keep":
            return "fedpano keeps the moments of three optimizers"
        key = ("fedpano", "is small")

        def reads_little() -> bool:
            reach = build_parts(client).personal.reach
            read = training_part(Group(client), reach).around.matrix.shape[1]
            return 2 * read < client.data.training.inputs.num_nodes

        is_small = client.cached(key, reads_little)
        return "its training reads less than half of its graph" if is_small else ""

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Run steps 5 to 7 of Algorithm 1 ``local-epochs`` times."""
        kind = Trainer
        if not group.is_stacked:
            parts = assemble_modules(group.clients[0], downloads[0])
        else:
            parts = stack_modules(group, downloads)
            kind = DescendingTrainer if group.config.optimizer == "sgd" else Trainer
        trainer = kind(group, parts)
        with group.drawing("training"):
            terms = trainer.train(group.config.local_epochs)
        if parts.generator is not None and parts.shared.generator is None:
            group.keep("generator", parts.generator.state_dict())
        rows = terms_of_clients(terms, len(group))
        losses = [float(sum(row[n] for n in LOSSES if n in row)) for row in rows]
        return replace(
            group.fit_of_weights(parts.personal, parts.shared.state_dict(), losses),
            terms=rows,
            logits=trainer.logits(),
            states=split_personal(group, parts.personal) if group.is_stacked else (),
        )

    def build(self, client: Client) -> Backbone:
        """Build the network that predicts."""
        return build_parts(client).personal

    def first_model(self, client: Client, download: Weights | None) -> Backbone | None:
        """Return the received model."""
        return None if download is None else assemble_modules(client, download).personal

    @torch.no_grad()
    def embed_kinds(
        self, client: Client, weights: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[Tensor, Tensor]] | None:
        """Embed with θ_*^g and generate nodes with φ_*, Fig. 5; ``None`` in variant nN."""
        if not client.config.method_config.use_generator:
            return None
        parts = assemble_modules(client, Weights(weights))
        trainer = Trainer(Group(client, 0), parts)
        parts.personal.eval()
        data = client.data
        h = parts.personal.embed_nodes(data.training.inputs)
        test = data.columns[0]["test"] & (data.labels[0] >= 0)
        near, labels = trainer.represent(), data.training.labels
        made = trainer.synthetic(trainer.nodes(near), trainer.around(near))
        return {
            "synthetic": (made.flatten(0, 1), labels.repeat_interleave(made.shape[1])),
            "test": (h[test], data.labels[0][test]),
            "train": (h[data.training.index], labels),
        }
