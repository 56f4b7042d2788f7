"""FedLoG's client half: two branches on the own graph, and synthetic nodes of all.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
φ_k                    ``FedLogBranchNet.encoder``
θ_k^H, θ_k^T           ``FedLogBranchNet.classifier["head"]``, ``["tail"]``
X_k^H, X_k^T           ``FedLogBranchNet.nodes["head"]``, ``["tail"]``
γ_k                    ``LocalLearner.gamma``
X^g, x̂                 ``download.nodes``, ``scale_nodes(...)``
β, λ, s                ``fedlog.beta``, ``tail-degree``, ``nodes-per-class``
=====================  ==================================================

===============================================  ===========================
algorithm, client                                function
===============================================  ===========================
prompt generator, Eqs. (11)-(13)                 ``train_generator``
pretraining of the published code                ``pretrain_encoder``
local fitting, L_cls and L_norm                  ``LocalLearner.fitting_loss``
local generalisation, Eq. (5) and L_g            ``LocalLearner.general_loss``
prediction, Eqs. (1)-(3)                         ``FedLogBranchNet.head``
===============================================  ===========================
"""

from __future__ import annotations

from dataclasses import replace

from flwr.app import Context, Message

from flower_fgl.algorithms.fedlog.matching import PromptTask
from flower_fgl.algorithms.fedlog.network import FedLogBranchNet, LinearTop, start_nodes
from flower_fgl.algorithms.fedlog.prompts import make_generator, train_generator
from flower_fgl.algorithms.fedlog.synthetic import class_rates, disguise_rates
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.fedlog_training import LocalLearner
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.training import load_state, refuse_non_finite
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.protocols.fedlog import (
    PRETRAIN,
    FedLogDownload,
    FedLogShapes,
    FedLogUpload,
    PromptUpload,
    build_network,
)

__all__ = ["FedLogClientApp"]

PATIENCE = 10
"""Epochs of pretraining without a better one after which it ends; the published code's."""


class FedLogClientApp(FglClientApp):
    """Train on the own nodes and on synthetic ones; keep the learnable nodes and γ.

    Notes
    -----
    1. Before the first upload a client's learnable nodes are those that all clients
       start from.
    2. The published code trains each client's encoder under a linear classifier before
       the first round, and stops by test accuracy; the paper says nothing of it. Here
       it is off, and ``local-pretrain-epochs`` stops by validation accuracy, in the
       first round that a client trains in.
    3. A client none of whose training nodes has a neighbour sends its prompt generator
       as it began, which counts like the others.
    4. The batches of an epoch are parts of one permutation of the training nodes, so
       that none is drawn twice; what is left after the whole ones is passed over.
    5. Adam is built anew each round, as in the published code. Its first step moves every
       entry by the learning rate, whatever its gradient, so that a client whose round is
       one batch only ever takes such steps. ``optimizer-state = "keep"`` spares it.
    """

    down = FedLogDownload
    up = FedLogUpload

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.train(PRETRAIN)(self._pretrain)

    def download_spec(self, client: Client) -> FedLogShapes:
        """Expect the shapes of the client's network."""
        key = (
            "fedlog-shapes",
            client.config.method_config,
            client.config.hidden_channels,
        )
        if key not in client.data.memo:
            shapes = FedLogShapes.of(open_network(client), client.config.method_config)
            client.data.memo[key] = shapes
        found: FedLogShapes = client.data.memo[key]
        return found

    def pretrain(
        self, client: Client, server_round: int, download: FedLogDownload
    ) -> Fit:
        """Train PG_k by Eqs. (11)-(13), and say what share each class has."""
        config, method_config, data = (
            client.config,
            client.config.method_config,
            client.data.training,
        )
        classes = client.data.graph.num_classes
        loss, prompts = 0.0, {}
        if method_config.pg:
            with seeded(derive_seed(config.seed, 0, SERVER, "prompts")):
                generator = make_generator(data.inputs.num_features)
            generator.to(client.device)
            task = PromptTask(data.inputs, data.index, data.labels, classes)
            with seeded(client.seed(0, "prompts"), client.device):
                loss = train_generator(
                    generator,
                    task,
                    epochs=method_config.prompt_epochs,
                    networks=method_config.prompt_networks,
                    lr=method_config.prompt_lr,
                )
            prompts = {n: t.detach().cpu() for n, t in generator.state_dict().items()}
            refuse_non_finite(prompts, rate="fedlog.prompt-lr")
        rates = disguise_rates(
            class_rates(data.labels.cpu(), classes),
            method_config.class_rate_noise,
            scale=method_config.noise_scale,
            generator=torch_generator(config.seed, 0, client.partition_id, "rates"),
        )
        return Fit(None, PromptUpload(rates, prompts), loss)

    def fit(self, client: Client, server_round: int, download: FedLogDownload) -> Fit:
        """Train ``local-epochs`` epochs, keep X_k^H, X_k^T and γ_k."""
        kept = self.personal_model(client, None)
        network = kept or new_network(client)
        load_weights(network, download)
        if kept is None and client.config.method_config.local_pretrain_epochs:
            pretrain_encoder(client, network)
        if download.prompts:
            client.state.set_group("prompts", dict(download.prompts))
        learner = LocalLearner(client, network, download.nodes)
        loss = learner.train(server_round)
        client.state.set_group("scaling", {"gamma": learner.gamma.cpu()})
        return Fit(network, self.upload(client, network), loss)

    def upload(self, client: Client, network: FedLogBranchNet) -> FedLogUpload:
        """Return the weights, and the learnable nodes of the branch that is asked for."""
        method_config = client.config.method_config
        branch = "tail" if method_config.synthetic_mode.endswith("T") else "head"
        nodes = network.nodes[branch].detach() if method_config.lg else None
        return FedLogUpload(network.shared_state(), nodes)

    def personal_model(
        self, client: Client, download: FedLogDownload | None
    ) -> FedLogBranchNet | None:
        """Return the network trained last; before it the received weights."""
        saved = client.state.group("model")
        if saved:
            network = open_network(client)
            load_state(network, saved)
            return network
        if download is None:
            return None
        network = new_network(client)
        load_weights(network, download)
        return network

    def _pretrain(self, message: Message, context: Context) -> Message:
        return self.handle_fit(message, context, self.pretrain)


def open_network(client: Client) -> FedLogBranchNet:
    """Build the client's network; all its numbers are to be overwritten."""
    config, graph = client.config, client.data.graph
    with seeded(derive_seed(config.seed, 0, SERVER, "init")):
        network = build_network(
            config.method_config,
            model=client.model_name,
            num_features=graph.num_features,
            num_classes=graph.num_classes,
            width=config.hidden_channels,
            num_layers=config.num_layers,
            dropout=config.dropout,
        )
    return network.to(client.device)


def new_network(client: Client) -> FedLogBranchNet:
    """Build a network with the learnable nodes that all clients start from."""
    network = open_network(client)
    size, width = network.nodes["head"].shape
    with seeded(derive_seed(client.config.seed, 0, SERVER, "nodes")):
        nodes = start_nodes(size, width)
    load_state(network, {f"nodes.{name}": x for name, x in nodes.items()})
    return network


def load_weights(network: FedLogBranchNet, download: FedLogDownload) -> None:
    """Overwrite φ and θ, not the learnable nodes.

    Raises
    ------
    PayloadError
        If the message brought no weights.
    """
    if not download.weights:
        raise PayloadError("the message brought no weights")
    load_state(network, download.weights)


def pretrain_encoder(client: Client, network: FedLogBranchNet) -> None:
    """Train φ, as received, under a linear classifier, which is thrown away.

    At most ``local-pretrain-epochs`` epochs; of them the one best on the validation
    nodes is kept, without any the last.
    """
    with seeded(client.seed(1, "classifier of pretraining"), client.device):
        width, classes = client.config.hidden_channels, network.num_classes
        model = LinearTop(network.encoder, width, classes).to(client.device)
    config = replace(
        client.config, check_every=1, patience=PATIENCE, optimizer_state="reset"
    )
    epochs: int = client.config.method_config.local_pretrain_epochs
    replace(client, config=config).train(model, 1, epochs=epochs, purpose="pretraining")
