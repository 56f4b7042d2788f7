"""FedSage+'s client half: FedAvg's on graphs mended by a generator of neighbours.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS
2021.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
Ḡ_i                    ``Impaired.inputs``
dGen, fGen             ``NeighbourGenerator.count``, ``.features``
z_v + N(0, 1)          ``GeneratorState.inputs``
n_v, ñ_v               ``Impaired.counts``, ``NeighbourGenerator.count(z)``
α                      ``fedsage+.peer-weight``
=====================  ==================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from flwr.app import Context, Message
from torch import Tensor

from flower_fgl.algorithms.fedsageplus import (
    FeatureGenerator,
    MendedGraph,
    NeighbourGenerator,
    generator_loss,
    match_loss,
    noise_like,
)
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fedsageplus_graphs import (
    impaired_of,
    keep_mended,
    mended_data,
    noise_of,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import StateStore
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.client_apps.runtime.upload_privacy import privatize
from flower_fgl.core.seeds import seeded
from flower_fgl.protocols.base import CONFIG, Empty, Payload
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedsageplus import (
    GENERATE,
    JUDGE,
    FeatureGradient,
    GeneratorState,
    generator_shapes,
)

log = logging.getLogger(__name__)

__all__ = ["FedSagePlusClientApp", "judge_generator", "train_generator"]

GENERATOR_EPOCHS = 5
"""Adam steps of a generator in each round of generator training."""
GENERATOR_LR = 1e-3
"""Learning rate (Adam) of the generator."""


class FedSagePlusClientApp(FedAvgClientApp):
    """Train a generator of neighbours, mend every graph once, then do as FedAvg.

    Notes
    -----
    1. The feature loss takes as many vectors of a node as neighbours are hidden, at most
       ``max-neighbours``; the paper as many as dGen predicts, which may be none, so that
       fGen would learn nothing until dGen has.
    2. The gradient that goes back is that of fGen's weights, summed over nodes. One of the
       generated features would be 2(x̃ − x): it would give the judge's features away.
    3. A client gets what it misses in the graph it trains on and in every graph it is
       scored on, those of other nodes or a new client included, by its one generator.
    4. Nodes are hidden among the validation nodes; where the training graph has none,
       among all. Labels of hidden nodes are never used, nor those of others than training
       nodes.
    5. Adam starts anew in each round of the generator: its moments are twice as large as
       the generator, and are not kept. When the graphs are mended the generator is dropped
       and the generated nodes are kept. A kept model predicts a graph as it is given.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.query(GENERATE)(self._generate)
        self.query(JUDGE)(self._judge)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Gather graph, settings and memory; graphs are mended once they can be."""
        client, store = super().open(message, context)
        client.data = mended_data(client)
        return client, store

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train as FedAvg does, on the mended graph if there is one."""
        if (
            client.config.method_config.gen_rounds
            and "mended" not in client.state.values
        ):
            log.warning(
                "Client %d has no mended graphs: generator training failed, or its memory "
                "was lost. It trains on its graph as it is.",
                client.partition_id,
            )
        return super().fit(client, server_round, download)

    def _generate(self, message: Message, context: Context) -> Message:
        """Train the generator; send it to be judged, or mend after the last round."""
        client, store = self.open(message, context)
        step = int(message.content.config_records[CONFIG]["server-round"])  # type: ignore[arg-type]
        gradient = FeatureGradient.from_record(message.content, shapes_of(client))
        network = train_generator(client, step, gradient.tensors)
        reply: Payload = Empty()
        if step == client.config.method_config.gen_rounds:
            client.state.set_group("generator", {})
            keep_mended(client, network)
        else:
            client.state.set_group("generator", network.state_dict())
            reply = privatize(client, self.show(client, step, network))
        store.save(context, client.partition_id, client.state)
        return Message(reply.to_record(), reply_to=message)

    def show(
        self, client: Client, step: int, network: NeighbourGenerator
    ) -> GeneratorState:
        """Return fGen and its inputs, as others need them to judge it."""
        impaired = impaired_of(client)
        generator = noise_of(client, step, "shown")
        with torch.no_grad():
            z = network.embed(impaired.inputs)[impaired.centres]
            inputs = z + noise_like(z, generator)
        has_any = len(impaired.centres) > 0
        return GeneratorState(
            network.features.state_dict() if has_any else {},
            inputs.cpu(),
            impaired.wanted(network.features.most).to(torch.uint8).cpu(),
        )

    def _judge(self, message: Message, context: Context) -> Message:
        """Find the gradient for another client's generator."""
        client, _ = self.open(message, context)
        method_config = client.config.method_config
        spec = (
            shapes_of(client),
            client.config.hidden_channels,
            method_config.max_neighbours,
        )
        shown = GeneratorState.from_record(message.content, spec)
        found = privatize(client, FeatureGradient(judge_generator(client, shown)))
        return Message(found.to_record(), reply_to=message)


def shapes_of(client: Client) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fGen's weights."""
    return generator_shapes(
        client.config.method_config,
        in_channels=client.config.hidden_channels,
        num_features=client.data.graph.num_features,
    )


def feature_generator(
    client: Client, state: Mapping[str, Tensor] | None = None
) -> FeatureGenerator:
    """Build fGen with the weights given, else drawn from torch's global generator."""
    method_config = client.config.method_config
    with torch.device("cpu" if state is None else "meta"):  # drawing takes its time
        network = FeatureGenerator(
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


def open_generator(client: Client) -> NeighbourGenerator:
    """Return the client's own generator, trained so far."""
    graph, saved = client.data.graph, client.state.group("generator")
    first = "features."
    own = {n[len(first) :]: t for n, t in saved.items() if n.startswith(first)}
    with seeded(client.seed(0, "generator")):
        network = NeighbourGenerator(
            feature_generator(client, own or None),
            num_features=graph.num_features,
            hidden_channels=client.config.hidden_channels,
            num_classes=graph.num_classes,
        ).to(client.device)
    load_state(network, {n: t for n, t in saved.items() if not n.startswith(first)})
    return network


def train_generator(
    client: Client, step: int, gradient: Mapping[str, Tensor]
) -> NeighbourGenerator:
    """Take ``GENERATOR_EPOCHS`` steps on the client's own loss and what others found.

    Parameters
    ----------
    client : Client
        Its graph and its generator.
    step : int
        Round of generator training, from 1.
    gradient : mapping of str to Tensor
        Mean gradient of fGen that others found; empty for none.

    Returns
    -------
    NeighbourGenerator
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
    mended = MendedGraph(impaired.inputs, owner, empty)
    others = [
        (weight, method_config.peer_weight * gradient[name].to(client.device))
        for name, weight in network.features.named_parameters()
        if gradient
    ]
    optimizer = torch.optim.Adam(network.parameters(), lr=GENERATOR_LR, fused=True)
    generator = noise_of(client, step, "generator")
    width = client.config.hidden_channels
    for _ in range(GENERATOR_EPOCHS):
        noise = torch.randn((len(impaired.centres), width), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss = generator_loss(
            network, impaired, mended, noise.to(client.device), index, labels
        )
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, found in others:
            if weight.grad is not None:
                weight.grad += found
        optimizer.step()
    return network


def judge_generator(client: Client, shown: GeneratorState) -> dict[str, Tensor]:
    """Find the gradient of another client's feature loss against the own nodes.

    Parameters
    ----------
    client : Client
        Who judges; its training graph's features are compared with.
    shown : GeneratorState
        fGen and inputs of the other.

    Returns
    -------
    dict of str to Tensor
        Gradient of every weight of fGen, on the CPU; empty where nothing was shown.
    """
    if not len(shown.counts):
        return {}
    network = feature_generator(client, shown.tensors)
    counts = shown.counts.long().to(client.device)
    made = network.generate(shown.inputs.to(client.device), counts)
    loss = match_loss(made, client.data.inputs[0].x)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: weight.grad.cpu()
        for name, weight in network.named_parameters()
        if weight.grad is not None
    }
