"""Modules of one FedPANO client, and the part of its graph that training reads.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import NodeGenerator, mean_rows
from flower_fgl.algorithms.fedpano.model import PersonalNet
from flower_fgl.algorithms.fedpano.shared import SharedParts
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, GraphInput, SparseOperator
from flower_fgl.nn.computation_graph import receptive_field
from flower_fgl.nn.layers import RepNorm
from flower_fgl.protocols.fedavg import Weights

__all__ = ["Parts", "TrainingPart", "assemble_modules", "build_parts"]
__all__ += ["every_classifier", "training_part"]

Client = AnyClient[FedPANOSettings]


@dataclass(frozen=True, eq=False)
class Parts:
    """All modules that one client trains.

    ``shared`` are uploaded; ``own`` is θ_i^c, from H to the client's own classes
    (``None`` in variant nT); ``generator`` φ_i, that of ``shared`` or, in variant nF, the
    client's own (``None`` in nN and nG). ``personal`` predicts and consists of the same
    modules. ``classes`` (C_i,) are Y_i, ascending; all classes if there is no training
    node.
    """

    shared: SharedParts
    own: nn.Linear | None
    generator: NodeGenerator | None
    personal: PersonalNet
    classes: Tensor


def build_parts(client: Client) -> Parts:
    """Build a client's modules; the weights of the shared ones are to be overwritten."""
    config, graph = client.config, client.data.graph
    method_config: FedPANOSettings = config.method_config
    every = torch.arange(graph.num_classes, device=client.device)
    labels = client.data.training.labels
    classes = every[client.data.own_classes]
    with seeded(client.seed(0, "parts")):
        shared = SharedParts(
            client.model_name,
            in_channels=graph.num_features,
            hidden_channels=config.hidden_channels,
            num_classes=graph.num_classes,
            num_layers=config.num_layers,
            dropout=config.dropout,
            method_config=method_config,
            initialise=False,
        )
        width, own, generator = shared.encoder.hidden_channels, None, shared.generator
        if len(labels) == 0:
            classes = every
        if method_config.use_client_classifier and (
            len(labels) or shared.classifier is None
        ):
            own = _own_classifier(client, width, classes)
        if method_config.has_generator and generator is None:
            generator = NodeGenerator(width)
    chosen = classes if own else every
    # the settings' validation ensures that there is one of the two
    classifier = cast(nn.Linear, own or shared.classifier)
    norm = cast(RepNorm, method_config.rep_norm)
    personal = PersonalNet(shared.encoder, classifier, chosen, len(every), norm)
    for module in (shared, personal, generator):
        if module is not None:
            client.settle(module)
    return Parts(shared, own, generator, personal, classes)


def _own_classifier(client: Client, width: int, classes: Tensor) -> nn.Linear:
    """Return θ_i^c as rows of :func:`every_classifier`."""
    every = every_classifier(client, width)
    own = nn.Linear(width, len(classes))
    with torch.no_grad():
        own.weight.copy_(every.weight[classes.cpu()])
        own.bias.copy_(every.bias[classes.cpu()])
    return own


def every_classifier(client: Client, width: int) -> nn.Linear:
    """Draw a classifier of all classes that is the same on all clients."""
    with seeded(derive_seed(client.config.seed, 0, SERVER, "own classifier")):
        return nn.Linear(width, client.data.num_classes)


def assemble_modules(client: Client, download: Weights) -> Parts:
    """Combine the received modules with those that the client keeps."""
    parts = build_parts(client)
    load_state(parts.shared, download.tensors)
    kept = client.state.group("model")
    if parts.own is not None and kept:
        own = {name: kept[f"classifier.{name}"] for name in parts.own.state_dict()}
        load_state(parts.own, own)
    if parts.generator is not None:
        load_state(parts.generator, client.state.group("generator"))
    return parts


@dataclass(frozen=True, eq=False)
class TrainingPart:
    """The part of a client's graph that its training reads.

    ``inputs`` are the whole graph, or the computation graph of the M nodes needed: the
    training nodes, in the rows ``index`` (n,), and their neighbours. ``around`` (n, M)
    averages over the neighbours of each training node.
    """

    inputs: GraphInput
    index: Tensor
    around: SparseOperator

    @property
    def num_bytes(self) -> int:
        """Memory of the extracted part, in bytes."""
        entries = self.around.matrix.values().numel()
        return int(getattr(self.inputs, "num_bytes", 0)) + 2 * 8 * entries


def training_part(client: Client, model: Backbone) -> TrainingPart:
    """Extract the part that training reads, once for each graph and backbone."""
    memo, key = client.data.memo, ("training part", model.reach)
    if key not in memo:
        data = client.data.training
        edges, size = data.inputs.edge_index, data.inputs.num_nodes
        is_near = torch.zeros(size, dtype=torch.bool, device=edges.device)
        is_near[data.index] = True
        is_near[edges[0][is_near[edges[1]]]] = True
        near = is_near.nonzero().squeeze(1)
        reach = model.reach
        part = receptive_field(data.inputs, near, reach) if reach else None
        place = torch.arange(size, device=edges.device)
        if part:
            place[near] = torch.arange(len(near), device=edges.device)
            size = len(near)
            edges = edges[:, is_near[edges].all(0)]
        memo[key] = TrainingPart(
            part or data.inputs,
            place[data.index],
            mean_rows(place[edges], place[data.index], size),
        )
    found: TrainingPart = memo[key]
    return found
