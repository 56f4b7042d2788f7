"""Client half of F²L: a classifier of all classes, and a module that learns to adapt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_fgl.algorithms import f2l
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.fedproto import labelled_embeddings
from flower_fgl.client_apps.fggp import TwoViews
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.state import split_prefix
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.f2l import ADAPTATION, F2LSettings
from flower_fgl.nn import Backbone, GraphInput, state_shapes
from flower_fgl.protocols.fedavg import Weights

__all__ = ["Episodes", "F2LClientApp", "F2LNetwork", "draw_episodes", "ranks_in_class"]


@dataclass(frozen=True, eq=False)
class Episodes:
    """B episodes of at most M nodes each.

    ``index`` (B, M) are positions in the list of training nodes; ``is_support`` and
    ``is_query`` (B, M) their roles, neither for padding; ``classes`` (B, C) those of each
    episode.
    """

    index: Tensor
    is_support: Tensor
    is_query: Tensor
    classes: Tensor


def ranks_in_class(sorted_labels: Tensor, num_classes: int) -> Tensor:
    """Return each node's position in its class, from 0; labels (n,) are ascending."""
    count = torch.bincount(sorted_labels, minlength=num_classes)
    start = count.cumsum(0) - count
    place = torch.arange(len(sorted_labels), device=sorted_labels.device)
    return place - start[sorted_labels]


def draw_episodes(
    labels: Tensor,
    num_classes: int,
    *,
    episodes: int,
    ways: int,
    shots: int,
    queries: int,
    generator: torch.Generator,
) -> Episodes:
    """Draw B ``episodes`` of classes, with disjoint support and query nodes of each class.

    A class has ``shots`` support nodes, but leaves at least one node for the queries. A
    class of a single node has it in the support set and has no query. ``ways``, ``shots``
    and ``queries`` are the largest numbers of classes per episode, and of support and
    query nodes per class. The generator is on the CPU.
    """
    device, size = labels.device, len(labels)
    own = torch.unique(labels)
    scores = torch.rand(episodes, len(own), generator=generator).to(device)
    chosen = own[scores.topk(min(ways, len(own)), dim=1).indices]  # (B, N)
    classes = torch.zeros(episodes, num_classes, dtype=torch.bool, device=device)
    classes.scatter_(1, chosen, value=True)
    # every row lists the nodes class by class, in random order within a class
    order = torch.rand(episodes, size, generator=generator).to(device).argsort(dim=1)
    order = order.gather(1, labels[order].argsort(dim=1, stable=True))
    listed = labels.sort().values
    rank = ranks_in_class(listed, num_classes)
    available = torch.bincount(labels, minlength=num_classes)[listed]
    number = (available - 1).clamp(min=1, max=shots)
    is_support = classes[:, listed] & (rank < number)
    is_query = classes[:, listed] & (rank >= number) & (rank < number + queries)
    is_used = is_support | is_query
    width = int(is_used.sum(dim=1).max())
    front = is_used.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    front = front[:, :width]
    return Episodes(
        order.gather(1, front),
        is_support.gather(1, front),
        is_query.gather(1, front),
        classes,
    )


Client = AnyClient[F2LSettings]


class F2LNetwork(TwoViews):
    """Store the last embeddings and logits of the client model for the episodes.

    Training computes only ``part``, the receptive field of all training nodes, if given.
    """

    part: GraphInput | None = None
    is_part = False

    @property
    def reach(self) -> int | None:
        """The backbone's number of layers that read neighbours."""
        return None if self.part is None else self.backbone.reach

    def embed(self, graph: GraphInput) -> Tensor:
        """Return and keep the penultimate representation of each node or graph."""
        self.is_part = self.part is not None and graph is self.part
        return super().embed(graph)


class F2LClientApp(FglClientApp):
    """Train the model and the module together; adapt before prediction.

    Notes
    -----
    1. Both are trained by one loss: cross-entropy over all classes, the mean query loss of
       the episodes after adaptation, and the contrast and distillation terms between model
       and module. The distillation's teacher is constant; every other term trains both.
    2. The N-way classifier consists of the rows of the episode's classes in a table of
       all C classes. This table fits clients with other classes and can be averaged. Here
       the classes to predict are those that are trained on.
    3. Before prediction the module takes the inner steps on the client's training nodes,
       at most ``support`` per class. It predicts only classes of these nodes.
    4. With ``check-every``, checks evaluate the classifier of all classes.
    """

    down = Weights
    up = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights of client model and module."""
        module = state_shapes(build_module(client, client.build_model()))
        named = {ADAPTATION + name: shape for name, shape in module.items()}
        return {**client.state_shapes(), **named}

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train by all losses, then adapt for prediction."""
        network = assemble_model(client, download)
        if not client.config.batch_size:
            # episodes draw from all training nodes in their order; a batch has another
            network.part = client.data.training.part_for(network.backbone)
        penalty = self.penalty(client, server_round, network)
        loss = client.train(network, server_round, penalty=penalty)
        module = adaptation_of(network)
        added = {ADAPTATION + name: t for name, t in module.state_dict().items()}
        upload = Weights({**network.backbone.state_dict(), **added})
        adapted = adapt_for_prediction(client, network.backbone, module)
        return Fit(adapted, upload, loss)

    def penalty(
        self, client: Client, server_round: int, network: F2LNetwork
    ) -> Callable[[], Tensor]:
        """Return a function that draws new episodes and returns their mean loss."""
        method_config, data = client.config.method_config, client.data.training
        module = adaptation_of(network)
        generator = client.generator(server_round, "episodes")

        def episodes_loss() -> Tensor:
            teacher = network.logits.detach()
            if network.is_part:
                h, labels = network.embedding, data.labels
            else:
                h, labels = labelled_embeddings(network, data)
                if network.items is None:
                    teacher = teacher[data.index]
            drawn = draw_episodes(
                labels,
                client.data.num_classes,
                episodes=method_config.episodes,
                ways=method_config.ways,
                shots=method_config.shots,
                queries=method_config.queries,
                generator=generator,
            )
            losses = f2l.episode_losses(
                module,
                method_config,
                h[drawn.index],
                teacher[drawn.index],
                labels[drawn.index],
                drawn.is_support,
                drawn.is_query,
                drawn.classes,
            )
            return losses.mean()

        return episodes_loss

    def personal_model(
        self, client: Client, download: Weights | None
    ) -> Backbone | None:
        """Return the model trained last, or the received one before the first training."""
        saved = client.state.group("model")
        if saved:
            backbone = client.build_model()
            module = build_module(client, backbone)
            model = f2l.AdaptedModel(
                backbone, module, saved["support"], saved["classes"]
            )
            load_state(model, saved)
            return model.to(client.device)
        if download is None:
            return None
        network = assemble_model(client, download)
        module = adaptation_of(network)
        return adapt_for_prediction(client, network.backbone, module)


def build_module(client: Client, backbone: Backbone) -> f2l.Adaptation:
    """Build the client's module with uninitialised weights."""
    classes = client.data.num_classes
    return f2l.Adaptation.blank(backbone.hidden_channels, classes, client.device)


def assemble_model(client: Client, download: Weights) -> F2LNetwork:
    """Build the client model and the module from the received weights."""
    backbone = client.build_model()
    module = build_module(client, backbone)
    network = F2LNetwork(backbone, module)
    of_backbone, of_module = split_prefix(download.tensors, ADAPTATION)
    load_state(module, of_module)
    load_state(backbone, of_backbone)
    return network


def adaptation_of(network: F2LNetwork) -> f2l.Adaptation:
    """Return the module that is trained with a client model."""
    assert isinstance(network.extra, f2l.Adaptation)
    return network.extra


def adapt_for_prediction(
    client: Client, backbone: Backbone, module: f2l.Adaptation
) -> Backbone:
    """Return ``backbone`` with a copy of the module, adapted to any training nodes."""
    backbone.eval()
    data, method_config = client.data.training, client.config.method_config
    if len(data.index) == 0:
        return backbone
    num_classes = client.data.num_classes
    listed, order = data.labels.sort(stable=True)
    order = order[ranks_in_class(listed, num_classes) < method_config.support]
    part = data.part_for(backbone)
    with torch.no_grad():
        if part is not None:
            support = backbone.embed(part)[order]
        else:
            support = backbone.embed(data.inputs)[data.index[order]]
    labels = data.labels[order]
    classes = torch.bincount(labels, minlength=num_classes) > 0
    start = {n: t.detach().requires_grad_() for n, t in module.named_parameters()}
    with torch.inference_mode(mode=False), torch.enable_grad():
        adapted = f2l.adapt(
            start,
            support,
            labels,
            torch.ones_like(labels, dtype=torch.bool),
            classes,
            steps=method_config.inner_steps,
            lr=f2l.INNER_LR,
        )
    copy = build_module(client, backbone)
    load_state(copy, {name: t.detach() for name, t in adapted.items()})
    return f2l.AdaptedModel(backbone, copy, support, classes)
