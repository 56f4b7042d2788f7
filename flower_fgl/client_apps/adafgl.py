"""Client half of AdaFGL: FedAvg, then propagation by alike predictions on the own graph."""

from functools import partial

import torch

from flower_fgl.algorithms.adafgl import AdaFGLNet, adafgl_loss, homophily_confidence
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import clip_steps, load_state
from flower_fgl.methods.adafgl import AdaFGLSettings
from flower_fgl.nn import Backbone, optimizers
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.fedavg import Weights

__all__ = ["AdaFGLClientApp"]

Client = AnyClient[AdaFGLSettings]

CONFIDENCE = "confidence"
"""Name of h in the state of the network of the second step."""


class AdaFGLClientApp(FedAvgClientApp):
    """Train as in FedAvg; after the last round train the second step alone.

    Notes
    -----
    1. The second step is full-batch and keeps the epoch with the best validation score,
       as FedAvg's fine-tuning does. Nothing is uploaded.
    2. It has an optimizer of its own, Adam with ``adafgl.finetune-lr`` and
       ``adafgl.finetune-weight-decay``, whatever the rounds train with.
    3. The heads of all clients start from the same weights, those of the run's seed.
    4. The first step is FedAvg's, so that it has the same stacked form.
    """

    stacked = True

    def build_second(self, client: Client) -> AdaFGLNet:
        """Build the network of the second step."""
        return client.build_own(AdaFGLNet)

    def finetune(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Freeze the federated model, measure the homophily, train the heads."""
        network, data = self.build_second(client), client.data.training
        load_state(network.extractor, download.tensors)
        generator = client.generator(server_round, "homophily")
        order = torch.randperm(len(data.index), generator=generator)
        homophily = homophily_confidence(
            data.inputs.operator("normalised"),
            data.index,
            data.labels,
            order.to(client.device),
            num_nodes=data.inputs.num_nodes,
            num_classes=client.data.num_classes,
        )
        network.confidence.fill_(homophily)

        def run(
            optimizer: torch.optim.Optimizer, batches: torch.Generator, epochs: int
        ) -> float:
            for _ in range(epochs):
                network.train()
                optimizer.zero_grad(set_to_none=True)
                out, soft = network.outputs(data.inputs), network.soft(data.inputs)
                loss = adafgl_loss(out, soft, data.index, data.labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return float(loss.detach())

        settings = client.config.method_config
        optimizer = optimizers.Adam(
            (p for p in network.parameters() if p.requires_grad),
            lr=settings.finetune_lr,
            weight_decay=settings.finetune_weight_decay,
        )
        clip_steps(optimizer, client.config.clip_gradient)
        train = partial(
            client.train_by, run, network, server_round, optimizer=optimizer
        )
        loss = self.keep_best_epoch(client, network, train)
        # exact, and of half of the training nodes
        terms = {"homophily": homophily} if client.config.min_class_count <= 1 else {}
        return Fit(network, Empty(), loss, terms=terms)

    def personal_model(
        self, client: Client, download: Weights | None
    ) -> Backbone | None:
        """Return the model trained last, of either step."""
        saved = client.state.group("model")
        if CONFIDENCE not in saved:
            return super().personal_model(client, download)
        network = self.build_second(client)
        load_state(network, saved)
        return network
