"""Client half of FedSage+: FedAvg on graphs with generated missing neighbours.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
Ḡ_i                    ``HiddenNodes.inputs``
dGen, fGen             ``NeighbourGenerator.count``, ``.features``
z_v + N(0, 1)          ``GeneratorState.inputs``
n_v, ñ_v               ``HiddenNodes.counts``, ``NeighbourGenerator.count(z)``
α                      ``fedsage+.peer-weight``
=====================  ==================================================
"""

import logging
from collections.abc import Mapping

import torch
from flwr.app import Context, Message
from torch import Tensor

from flower_fgl.algorithms import fedsageplus
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.protection import privatize
from flower_fgl.client_apps.runtime.session import Opened, Session
from flower_fgl.client_apps.runtime.state import StateStore, split_prefix
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.nn import GraphInput, optimizers
from flower_fgl.protocols.base import LARGEST, Empty, Payload
from flower_fgl.protocols.describe import MAX_ITEMS
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedsageplus import (
    GENERATE,
    JUDGE,
    FeatureGradient,
    GeneratorState,
    generator_shapes,
)

__all__ = ["FedSagePlusClientApp", "impaired_of", "judge_generator", "judged_features"]
__all__ += ["keep_mended", "mended_data", "train_generator"]

log = logging.getLogger(__name__)


Client = AnyClient[FedSagePlusSettings]

GENERATOR_EPOCHS = 5
"""Adam steps of a generator in each round of generator training."""
GENERATOR_LR = 1e-3
"""Learning rate (Adam) of the generator."""
FEATURES = "features."
"""Prefix of fGen's tensors in the state of the generator."""
HIDDEN_SHARE = 0.5
"""Share of the validation nodes that are hidden to train the generator."""


def impaired_of(client: Client) -> fedsageplus.HiddenNodes:
    """Return the client's training graph with hidden nodes, the same in every round."""
    data, size = client.data, client.data.inputs[0].num_nodes

    def hide() -> fedsageplus.HiddenNodes:
        eligible = data.graph.graph.masks["val"].nonzero().squeeze(1)
        eligible = eligible if len(eligible) else torch.arange(size)
        order = torch.randperm(len(eligible), generator=client.generator(0, "hide"))
        is_hidden = torch.zeros(size, dtype=torch.bool)
        num_hidden = int(HIDDEN_SHARE * len(eligible))
        is_hidden[eligible[order[:num_hidden]]] = True
        return fedsageplus.hide_nodes(data.inputs[0], is_hidden.to(client.device))

    return client.cached(("impaired", client.config.seed), hide)


def judged_features(client: Client) -> torch.Tensor:
    """Return the rows with which a client compares what others generate.

    They are the features of its training graph. With ``min-class-count`` above 1 they are
    the means of groups of at least so many nodes: the gradient reveals each row that it
    was computed from.
    """
    x, least = client.data.inputs[0].x, client.config.min_class_count
    if least == 1:
        return x
    return client.cached(("judged", least), lambda: fedsageplus.group_means(x, least))


def keep_mended(client: Client, network: fedsageplus.NeighbourGenerator) -> None:
    """Generate the missing neighbours of each of the client's graphs and store them."""
    kept = {}
    for place, inputs in enumerate(client.data.inputs):
        generator = client.generator(place, "mending")
        owner, x = network.mend(inputs, generator)
        kept[f"{place}/owner"], kept[f"{place}/x"] = owner, x
    client.state.set_hashed_group("mended", kept)


def mended_data(client: Client) -> ClientData:
    """Return the client's data with mended graphs, or unchanged before there are any."""

    def build(found: dict[str, Tensor]) -> list[GraphInput]:
        moved = {name: tensor.to(client.device) for name, tensor in found.items()}
        return [
            fedsageplus.MendedGraph(
                inputs, moved[f"{place}/owner"], moved[f"{place}/x"]
            )
            for place, inputs in enumerate(client.data.inputs)
        ]

    return client.data_on("mended", build)


class FedSagePlusClientApp(FedAvgClientApp):
    """Train a neighbour generator, mend every graph once, then train as FedAvg.

    Notes
    -----
    1. The feature loss uses as many vectors per node as it has hidden neighbours, at most
       ``max-neighbours``. The paper uses as many as dGen predicts. These may be none, and
       then fGen would learn nothing until dGen has learned.
    2. The returned gradient is that of fGen's weights, summed over nodes. It reveals the
       features of the nodes that it was computed from: the gradient of the last bias is
       a multiple of x̃ − x if one node is shown. Of more nodes the gradient of the last
       weight is a sum of outer products with activations that the server knows. So
       with ``min-class-count`` above 1 the targets are means over groups of nodes.
    3. With its one generator a client mends the graph it trains on and every graph it is
       evaluated on, including those of other nodes or of a new client.
    4. Nodes are hidden among the validation nodes, or among all nodes if the training graph
       has none. Labels of hidden nodes and of nodes other than training nodes are not used.
    5. Each round of generator training starts with a new Adam optimizer: its moments are
       twice as large as the generator, and are not kept. After mending the graphs the
       client deletes the generator and keeps the generated nodes. A saved model predicts on
       unmended graphs.
    6. A gradient for another client's generator that is not finite, or has a number above
       ``LARGEST``, is not sent. The reply is then empty. With ``upload-noise`` it consists
       of zeros with noise, because an empty reply would depend on the graph without noise.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.answer_once(GENERATE, self._generate, last=num_rounds)
        self.answer_once(JUDGE, self._judge, last=num_judgements, is_state_new=False)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Load graph, settings and state of a client; its graphs are mended if possible."""
        client, store = super().open(message, context)
        client.data = mended_data(client)
        return client, store

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train as FedAvg does, on the mended graph if there is one."""
        is_mended = "mended" in client.state.values
        if client.config.method_config.gen_rounds and not is_mended:
            log.warning(
                "Client %d has no mended graphs and trains on its original graph: "
                "generator training failed, or the client's state was lost.",
                client.partition_id,
            )
        return super().fit(client, server_round, download)

    def _generate(self, opened: Opened) -> Payload:
        """Train the generator; return it or, after the last round, mend the graphs."""
        client, step = opened.client, opened.server_round
        shapes = shapes_of(client)
        gradient = FeatureGradient.from_record(opened.message.content, shapes)
        network = train_generator(client, step, gradient.tensors)
        if step == num_rounds(client):
            client.state.set_group("generator", {})
            keep_mended(client, network)
            return Empty()
        client.state.set_group("generator", network.state_dict())
        return privatize(client, self.show(client, step, network))

    def show(
        self, client: Client, step: int, network: fedsageplus.NeighbourGenerator
    ) -> GeneratorState:
        """Return fGen and its inputs, with which other clients compute its gradient."""
        impaired = impaired_of(client)
        generator = client.generator(step, "shown")
        with torch.no_grad():
            z = network.embed(impaired.inputs)[impaired.centres]
            inputs = z + fedsageplus.noise_like(z, generator)
        has_any = len(impaired.centres) > 0
        return GeneratorState(
            network.features.state_dict() if has_any else {},
            inputs.cpu(),
            impaired.wanted(network.features.most).to(torch.uint8).cpu(),
        )

    def _judge(self, opened: Opened) -> Payload:
        """Return the gradient of another client's generator."""
        client = opened.client
        sizes = (
            client.config.hidden_channels,
            client.config.method_config.max_neighbours,
        )
        spec = (shapes_of(client), *sizes, MAX_ITEMS)
        shown = GeneratorState.from_record(opened.message.content, spec)
        return privatize(client, feedback_on(client, shown))


def num_rounds(client: Client) -> int:
    """Return the number of rounds of generator training."""
    return int(client.config.method_config.gen_rounds)


def num_judgements(client: Client) -> int:
    """Return the largest number of generators that a client evaluates in a run."""
    others = client.num_partitions - 1
    return num_rounds(client) * min(client.config.method_config.peers or others, others)


def shapes_of(client: Client) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fGen's weights."""
    return generator_shapes(
        client.config.method_config,
        in_channels=client.config.hidden_channels,
        num_features=client.data.graph.num_features,
    )


def feature_generator(
    client: Client, state: Mapping[str, Tensor] | None = None
) -> fedsageplus.FeatureGenerator:
    """Build fGen with the given weights, or with weights from torch's global generator."""
    method_config = client.config.method_config
    # on "meta" no initial weights are drawn, which would take time
    with torch.device("cpu" if state is None else "meta"):
        network = fedsageplus.FeatureGenerator(
            client.config.hidden_channels,
            (method_config.gen_channels, method_config.gen_wide_channels),
            method_config.max_neighbours,
            client.data.graph.num_features,
        )
    if state is None:
        return network.to(client.device)
    network.to_empty(device=client.device)
    load_state(network, state)
    return network


def open_generator(client: Client) -> fedsageplus.NeighbourGenerator:
    """Return the client's generator as trained so far."""
    graph = client.data.graph
    saved, own = split_prefix(client.state.group("generator"), FEATURES)
    with seeded(client.seed(0, "generator")):
        network = fedsageplus.NeighbourGenerator(
            feature_generator(client, own or None),
            num_features=graph.num_features,
            hidden_channels=client.config.hidden_channels,
            num_outputs=graph.target.width,
        ).to(client.device)
    load_state(network, saved)
    return network


def train_generator(
    client: Client, step: int, gradient: Mapping[str, Tensor]
) -> fedsageplus.NeighbourGenerator:
    """Take ``GENERATOR_EPOCHS`` steps on the client's own loss and the others' gradient.

    ``gradient`` is the mean gradient of fGen from the other clients, or empty; ``step``
    the round of generator training, from 1.
    """
    method_config, data = client.config.method_config, client.data.training
    network, impaired = open_generator(client), impaired_of(client)
    number = torch.full((data.inputs.num_nodes,), -1, device=client.device)
    number[impaired.kept] = torch.arange(len(impaired.kept), device=client.device)
    is_left = number[data.index] >= 0
    index, labels = number[data.index[is_left]], data.labels[is_left]
    wanted = impaired.wanted(method_config.max_neighbours)
    owner = impaired.centres.repeat_interleave(wanted)
    empty = torch.zeros((len(owner), 0), device=client.device)
    mended = fedsageplus.MendedGraph(impaired.inputs, owner, empty)
    others = [
        (weight, method_config.peer_weight * gradient[name].to(client.device))
        for name, weight in network.features.named_parameters()
        if gradient
    ]
    optimizer = optimizers.Adam(network.parameters(), lr=GENERATOR_LR, fused=True)
    generator = client.generator(step, "generator")
    width = client.config.hidden_channels
    for _ in range(GENERATOR_EPOCHS):
        noise = torch.randn((len(impaired.centres), width), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss = fedsageplus.generator_loss(
            network, impaired, mended, noise.to(client.device), index, labels
        )
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, found in others:
            if weight.grad is not None:
                weight.grad += found
        optimizer.step()
    return network


def feedback_on(client: Client, shown: GeneratorState) -> FeatureGradient:
    """Return the gradient for another client's generator, before clipping and noise."""
    gradient = judge_generator(client, shown)
    # a comparison with NaN is false
    if all(bool((part.abs() <= LARGEST).all()) for part in gradient.values()):
        return FeatureGradient(gradient)
    log.warning(
        "Client %d judges a generator that gives no finite gradient.",
        client.partition_id,
    )
    if not client.config.upload_noise:
        return FeatureGradient({})
    return FeatureGradient({n: torch.zeros_like(part) for n, part in gradient.items()})


def judge_generator(client: Client, shown: GeneratorState) -> dict[str, Tensor]:
    """Compute the gradient of another client's feature loss against this client's nodes.

    The features of its training graph are the targets of the loss. The gradient of every
    weight of fGen is on the CPU; empty if ``shown`` is empty, and zero if the client has
    fewer nodes than ``min-class-count``.
    """
    if not len(shown.counts):
        return {}
    features = judged_features(client)
    if not features.shape[0]:
        return {name: torch.zeros_like(part) for name, part in shown.tensors.items()}
    network = feature_generator(client, shown.tensors)
    counts = shown.counts.long().to(client.device)
    made = network.generate(shown.inputs.to(client.device), counts)
    loss = fedsageplus.match_loss(made, features)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: weight.grad.cpu()
        for name, weight in network.named_parameters()
        if weight.grad is not None
    }
