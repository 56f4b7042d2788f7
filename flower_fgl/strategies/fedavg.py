"""FedAvg's server half, which several methods share."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.server_optimizer import server_step
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods import METHODS
from flower_fgl.nn import Backbone, build_model, state_shapes
from flower_fgl.nn.models import local_names
from flower_fgl.nn.state import BODY
from flower_fgl.nn.typed import unheld_names
from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.runs.checkpoints import Snapshot
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.run import RunFolder
from flower_fgl.strategies.aggregation import (
    mean_of_holders,
    mean_of_sums,
    mean_pairwise_distance,
    robust_mean,
    weighted_mean,
)
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.federation import Federation

log = logging.getLogger(__name__)

MOMENTS = "moments/"
STEPS = {"momentum": 1.0, "adam": 0.1, "adagrad": 0.1, "yogi": 0.01}
"""Default ``server-lr``, as in Flower."""

__all__ = ["FedAvg", "build_own", "common_model", "draw_model"]


def common_model(config: RunConfig, federation: Federation) -> str:
    """Return the name of the backbone that all clients have, else raise a RunError."""
    models = {client.model for client in federation.clients.values()}
    if len(models) > 1:
        raise RunError(
            f"{config.method} averages weights, so all clients need one model, "
            f"got {sorted(models)}. Use a single name in model, or a method that "
            "allows several."
        )
    return models.pop()


def draw_model(
    config: RunConfig,
    federation: Federation,
    model: str | None = None,
    *,
    num_outputs: int | None = None,
    in_channels: int | None = None,
) -> Backbone:
    """Build a backbone, by default that of all clients, from torch's global generator.

    ``num_outputs`` replaces the width of the target, ``in_channels`` that of features.
    """
    model = model or common_model(config, federation)
    width = in_channels or federation.num_features
    # local_names asks for more features, of nodes and of edges
    edge_width = federation.num_edge_features + width - federation.num_features
    return build_model(
        model,
        in_channels=width,
        hidden_channels=config.hidden_channels,
        num_outputs=num_outputs or federation.target.width,
        num_layers=config.num_layers,
        dropout=config.dropout,
        readout=config.graph_readout,
        link=config.decoder(federation.target.width, federation.num_edge_features),
        messages=config.messages(model, edge_width, federation.schema),
    )


def build_own(config: RunConfig, federation: Federation, model: str) -> Any:
    """Build the network of a method's row, as ``Client.build_own`` does on a client."""
    # networks of methods that classify nodes only do not take this argument
    readout = {"readout": config.graph_readout} if config.classifies_graphs else {}
    return METHODS[config.method].load_network()(
        config.method_config,
        model=model,
        num_features=federation.num_features,
        num_outputs=federation.target.width,
        width=config.hidden_channels,
        num_layers=config.num_layers,
        dropout=config.dropout,
        **readout,
    )


class FedAvg(FglStrategy):
    """Average the clients' weights, Algorithm 1.

    Notes
    -----
    1. With ``finetune-epochs`` > 0 one more exchange follows the last round. Every client
       trains the final model further on its own graph and keeps the epoch with the best
       validation score. The result is reported as ``finetuned`` and never selected as the
       best round.
    """

    down: ClassVar[type[Payload]] = Weights
    up: ClassVar[type[Payload]] = Weights
    averages_network: ClassVar[bool] = False
    """Whether the averaged network is that of the method's row, not the backbone."""
    has_parts: bool = False
    """Whether clients have different parts of the model, of typed graphs."""
    moments: Mapping[str, Tensor] = MappingProxyType({})

    def prepare(self) -> None:
        """Build the initial model, the same architecture for all clients."""
        self.has_parts = self.federation.has_parts
        name = common_model(self.config, self.federation)
        with seeded(derive_seed(self.config.seed, 0, SERVER, "init")), torch.no_grad():
            model = self.build(name)
        if self.config.initial_model and not self.is_resumed:
            self.start_from_saved(model)
        kept = self.local_names(name)
        self.weights = Weights(
            {n: t.detach() for n, t in model.state_dict().items() if n not in kept}
        )
        self.shapes = {n: s for n, s in state_shapes(model).items() if n not in kept}
        self.trained = frozenset(dict(model.named_parameters()))
        if not self.shapes:
            raise RunError(
                f"Nothing of {name} is left to average: its first layer and its head stay "
                "local. Use a backbone with more layers, or align features or classes by "
                "name."
            )

    def start_from_saved(self, model: nn.Module) -> None:
        """Load the weights of ``initial-model``, or raise a RunError if they do not fit."""
        # loads the networks of other methods
        from flower_fgl.runs.saved_model import load_model

        place = self.config.initial_model
        saved = load_model(Path(place))
        card, federation = saved.card, self.federation
        names = next(
            (c for c in federation.clients.values() if c.features_sha256), None
        )
        pairs: dict[str, tuple[Any, Any]] = {
            "classes or targets": (card.target.names, federation.target.names),
            "target kind": (card.target_kind, self.config.predicts),
            "shapes of the weights": (
                {n: tuple(t.shape) for n, t in saved.model.state_dict().items()},
                {n: tuple(t.shape) for n, t in model.state_dict().items()},
            ),
        }
        if names is not None and card.features_sha256:
            pairs["feature names"] = (card.features_sha256, names.features_sha256)
        if differing := [what for what, (one, other) in pairs.items() if one != other]:
            raise RunError(
                f"The model of initial-model = {place} does not fit this run: other "
                f"{', '.join(differing)} ({card.method}, {card.model}, "
                f"{card.num_features} features, outputs {', '.join(card.target.names)}). "
                "Use its settings and data of the same kind, or another model."
            )
        self.warn_of_other_split(Path(place))
        model.load_state_dict(saved.model.state_dict())

    def warn_of_other_split(self, place: Path) -> None:
        """Warn if ``initial-model`` is of a run on the same data, split otherwise."""
        try:  # the file of the model stands for its folder
            run = RunFolder.load(place.parent if place.name == MODEL else place)
        except RunError:  # the model folder of a data owner
            return
        config, keys = self.config, ("partition-seed", "split", "split-by")
        if config.owners or run.summary["dataset"] != config.dataset:
            return  # owners' files may have a split of their own
        flat = config.flat()
        own = {key: flat[key] for key in keys}
        is_same = all(run.config.get(key, value) == value for key, value in own.items())
        hashes = {run.summary.get("partition_sha256"), self.federation.partition_sha256}
        if not is_same or len(hashes) > 1:
            log.warning(
                "The model of initial-model = %s was trained on another partition or "
                "split of %s, so that test nodes of this run may be among those that it "
                "was trained on, and scores be too high. Use a model of a run with "
                "partition-seed = %s, split = %s and the same clients.",
                *(place, config.dataset, own["partition-seed"], own["split"]),
            )

    def local_names(self, model: str) -> frozenset[str]:
        """Return the weights that stay on the owners, see ``feature-align``."""
        config = self.config
        if not config.owners or not config.keeps_layers:
            return frozenset()
        return local_names(
            lambda width: draw_model(config, self.federation, model, in_channels=width),
            self.federation.num_features,
            first_layer=config.feature_align == "project",
            head=config.has_local_heads,
        )

    def build(self, model: str) -> nn.Module:
        """Build the initial network, whose state is sent and averaged."""
        build = build_own if self.averages_network else draw_model
        network: nn.Module = build(self.config, self.federation, model)
        return network

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Send the aggregated weights, those of kinds and relations that the client has."""
        if not self.has_parts:
            return self.weights
        names = self.upload_spec(partition_id)
        return Weights({n: t for n, t in self.weights.tensors.items() if n in names})

    def upload_spec(self, partition_id: int) -> Mapping[str, tuple[int, ...]]:
        """Expect the names and shapes of the downloaded weights."""
        if not self.has_parts:
            return self.shapes
        told = self.federation.clients[partition_id].told
        assert told is not None
        assert self.federation.schema is not None
        kinds, relations = told.places_in(self.federation.schema)
        rest = {*unheld_names(self.shapes, kinds, relations)}
        return {name: shape for name, shape in self.shapes.items() if name not in rest}

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Replace the weights by the weighted mean of the uploads, or a robust one."""
        states = [upload.payload.tensors for upload in uploads.values()]
        weights = [upload.num_examples for upload in uploads.values()]
        if self.has_parts:
            mean = mean_of_holders(states, weights, self.weights.tensors)
        elif self.config.aggregation == "mean":
            mean = weighted_mean(states, weights)
        else:
            mean, numbers = robust_mean(
                self.config, states, weights, self.weights.tensors
            )
            self.log(**numbers)
        self.move_to(mean, server_round)
        if len(states) > 1:
            common = set.intersection(*(set(state) for state in states))
            names = [n for n in states[0] if n.startswith(BODY) and n in common]
            encoders = [{name: state[name] for name in names} for state in states]
            self.log(distance=mean_pairwise_distance(encoders))

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Replace the weights by ``Σ n_k θ_k / Σ n_k``."""
        mean = mean_of_sums(sums, sum(weights.values()), self.shapes)
        self.move_to(mean, server_round)

    def move_to(self, mean: Mapping[str, Tensor], server_round: int) -> None:
        """Replace the weights by a mean, or by the step of ``server-optimizer`` to it.

        Buffers, e.g. running variances, are replaced. Flower's FedAdam depends on the
        round.
        """
        kind = self.config.server_optimizer
        if kind == "none":
            self.weights = Weights(mean)
            return
        config, is_flower = self.config, self.config.server_moments == "flower"
        beta1, beta2, factor = config.server_momentum, config.server_beta2, 1.0
        if kind == "adam" and is_flower:
            power = server_round + 1
            factor = (1 - beta2**power) ** 0.5 / (1 - beta1**power)
        start = {n: t for n, t in self.weights.tensors.items() if n in self.trained}
        moved, self.moments = server_step(
            kind,
            start,
            mean,
            self.moments,
            lr=config.server_lr or STEPS[kind],
            beta1=beta1,
            beta2=beta2,
            tau=config.server_tau,
            correction=factor,
            starts_at_zero=is_flower,
        )
        self.weights = Weights({n: moved.get(n, tensor) for n, tensor in mean.items()})

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated weights; ``None`` if a part of the model stays local."""
        config = self.config
        if not self.row.has_global_model or (config.owners and config.keeps_layers):
            return None
        is_typed = self.federation.schema is not None
        is_partial = is_typed and (
            config.schema_align != "same" or config.node_embedding
        )
        return None if is_partial else self.weights.tensors

    def server_state(self) -> Snapshot:
        """Return the weights and the optimizer's moments, and with ``kept`` the rest."""
        moments = {f"{MOMENTS}{name}": t for name, t in self.moments.items()}
        weights = Snapshot({**self.weights.tensors, **moments})
        if not self.kept:
            return weights
        return Snapshot.join({"weights": weights, "kept": super().server_state()})

    def load_server_state(self, state: Snapshot) -> None:
        """Restore the weights; names and shapes must be the model's."""
        own = state.part("weights") if self.kept else state
        weights = dict(own.tensors)
        moments = {
            name.removeprefix(MOMENTS): weights.pop(name)
            for name in own.tensors
            if name.startswith(MOMENTS)
        }
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if found != self.shapes:
            raise ValueError(f"weights of shapes {found}, expected {self.shapes}")
        self.weights = Weights({name: weights[name] for name in self.shapes})
        self.moments = moments
        if self.kept:
            super().load_server_state(state.part("kept"))

    def finish(self) -> None:
        """Fine-tune on every client if the method has ``finetune-epochs``, above 0."""
        if not getattr(self.config.method_config, "finetune_epochs", 0):
            return
        number, able = self.config.rounds + 1, self.federation.trainable
        with self.phase("finetune", number, is_scored=True):
            messages = self.train_messages(
                number, able, action="finetune", is_scored=True, brings_upload=False
            )
            self.read_uploads(self.messenger.exchange(messages), Empty)
            # clients that could not fine-tune evaluate the model they have
            rest = self.evaluate_messages(number, is_local=True, is_global=False)
            self.evaluate(number, rest)
