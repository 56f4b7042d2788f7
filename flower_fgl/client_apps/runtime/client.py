"""A client during one message: its graph, settings and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.runtime.training import (
    DataLoss,
    load_state,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    train_and_check,
    train_epochs,
)
from flower_fgl.core.calibration import DIFFUSED, Calibration
from flower_fgl.core.config import RunConfig, S
from flower_fgl.core.metrics import (
    AbsentClasses,
    AnyScores,
    Scores,
    score,
    score_areas,
    score_links,
)
from flower_fgl.core.model_spec import split_models
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.core.settings import read_num_neighbors
from flower_fgl.core.targets import LABELS
from flower_fgl.nn import Backbone, GraphInput, build_model, state_shapes
from flower_fgl.nn.backbone import copy_network
from flower_fgl.nn.models import local_names
from flower_fgl.nn.sparse import lay_out_for_sparse
from flower_fgl.nn.typed import unheld_names

if TYPE_CHECKING:
    from flower_fgl.algorithms.calibration import Surroundings

__all__ = ["Client"]

EMPTY = Scores(0, math.nan, math.nan, math.nan)
MASKED = "test_masked"
Module = TypeVar("Module", bound=nn.Module)
Entry = TypeVar("Entry")
Made = TypeVar("Made")


@dataclass(eq=False)
class Client(Generic[S]):
    """One client as a method's hooks see it, ``Client[FedPGSettings]`` with FedPG.

    ``data`` is its graph on ``device``, ``state`` what it keeps between rounds: changes
    by hooks are stored after the message.
    """

    config: RunConfig[S]
    partition_id: int
    num_partitions: int
    data: ClientData
    state: ClientState
    device: torch.device

    @property
    def model_name(self) -> str:
        """Backbone of this client: the names in ``model`` are assigned in turn."""
        models = _models_in_turn(self.config.model)
        return models[self.partition_id % len(models)]

    @property
    def weight(self) -> float:
        """Aggregation weight by the setting ``weight-by``, equal to the server's."""
        weights = {
            "entries": self.data.num_entries,
            "train-nodes": self.data.training.index.numel(),
            "nodes": self.data.graph.num_items,
            "equal": 1,
        }
        return float(weights[self.config.weight_by])

    def seed(self, server_round: int, purpose: str) -> int:
        """Derive a seed of this client."""
        return derive_seed(self.config.seed, server_round, self.partition_id, purpose)

    def generator(self, server_round: int, purpose: str) -> torch.Generator:
        """Return a CPU generator of this client."""
        place = self.partition_id
        return torch_generator(self.config.seed, server_round, place, purpose)

    def cached(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return what ``make`` returned for this key first, kept in the graph's memo."""
        memo = self.data.memo
        if key not in memo:
            memo[key] = make()
        found: Made = memo[key]
        return found

    def data_on(
        self, group: str, build: Callable[[dict[str, Tensor]], list[GraphInput]]
    ) -> ClientData:
        """Return the data on graphs built from a hashed group of the state, once for each.

        Their further nodes have no label, and are in no set that is evaluated. Without the
        group the data are unchanged.
        """
        data, token = self.data, self.state.values.get(group)
        if token is None:
            return data
        kept = data.memo.get((group,))
        if kept is None or kept[0] != token:
            graphs = build(self.state.group(group))
            # the same data in each round, which a stack keeps; graphs state their memory
            data.memo[group,] = kept = (token, data.with_inputs(graphs), graphs)
        found: ClientData = kept[1]
        return found

    def build_model(
        self,
        *,
        initialise: bool = False,
        num_outputs: int | None = None,
        own_weights: bool = False,
    ) -> Backbone:
        """Build the client's backbone.

        With ``initialise`` initial weights are drawn, the same on all clients with this
        backbone, or the client's ``own_weights``. Otherwise the caller must overwrite
        them. ``num_outputs`` is by default the width of the target.
        """
        config, memo = self.config, self.data.memo
        sizes = (config.hidden_channels, config.num_layers, config.dropout, num_outputs)
        key = ("backbone", self.model_name, *sizes)
        if not initialise and key in memo:
            return copy_network(cast(Backbone, memo[key]))
        drawn_for = self.partition_id if own_weights else SERVER
        with seeded(derive_seed(config.seed, 0, drawn_for, "init")):
            model = self._build(
                self.data.graph.num_features, num_outputs, initialise=initialise
            )
        model = self.settle(model)
        if not initialise:
            memo[key] = copy_network(model)
        return model

    def own_model(self, *, own_weights: bool = False) -> Backbone:
        """Build the model trained last, before the first training the initial one."""
        saved = self.state.group("model")
        model = self.build_model(initialise=not saved, own_weights=own_weights)
        load_state(model, saved)
        return model

    def _build(
        self, width: int, num_outputs: int | None = None, *, initialise: bool = False
    ) -> Backbone:
        """Build the client's backbone on the CPU for a feature width."""
        config, graph = self.config, self.data.graph
        # local_names asks for more features, of nodes and of edges
        edge_width = graph.num_edge_features + width - graph.num_features
        return build_model(
            self.model_name,
            in_channels=width,
            hidden_channels=config.hidden_channels,
            num_outputs=num_outputs or self.data.graph.target.width,
            num_layers=config.num_layers,
            dropout=config.dropout,
            readout=config.graph_readout,
            initialise=initialise,
            link=config.decoder(self.data.graph.target.width, graph.num_edge_features),
            messages=config.messages(
                self.model_name, edge_width, graph.schema, graph.graph.num_nodes
            ),
        )

    def settle(self, model: Module) -> Module:
        """Move a network to the client's device, in the memory layout of its features."""
        if self.data.graph.graph.x.layout == torch.sparse_csr:
            lay_out_for_sparse(model, self.data.graph.num_features)
        return model if self.device.type == "cpu" else model.to(self.device)

    def build_own(self, build: Callable[..., Module], **settings: Any) -> Module:
        """Build a method's own network with the weights with which all clients start.

        ``build`` takes the method's settings, the backbone's name, the sizes and
        ``settings``. The network is drawn once; each call returns a copy of it.
        """
        config, memo = self.config, self.data.memo
        key = (build, config, self.model_name, tuple(sorted(settings.items())))
        drawn_for, drawn = memo.get(("own network",), (None, None))
        if drawn_for == key:
            return copy_network(cast(Module, drawn))
        with seeded(derive_seed(config.seed, 0, SERVER, "init")):
            network = build(
                config.method_config,
                model=self.model_name,
                num_features=self.data.graph.num_features,
                num_outputs=self.data.graph.target.width,
                width=config.hidden_channels,
                num_layers=config.num_layers,
                dropout=config.dropout,
                **settings,
            )
        network = self.settle(network)
        memo["own network",] = (key, copy_network(network))
        return network

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state of the client's backbone."""
        key = ("state shapes", self.model_name)
        return self.cached(key, lambda: state_shapes(self.build_model()))

    def local_names(self) -> frozenset[str]:
        """Return the weights that stay on this client; none in most runs."""
        config, key = self.config, ("local names", self.model_name)
        is_typed = self.data.graph.schema is not None
        if is_typed and (config.schema_align != "same" or config.node_embedding):
            return self.cached(key, self._untold_names)
        if not config.owners or not config.keeps_layers:
            return frozenset()
        find = partial(
            local_names,
            self._build,
            self.data.graph.num_features,
            first_layer=config.feature_align == "project",
            head=config.has_local_heads,
        )
        return self.cached(key, find)

    def _untold_names(self) -> frozenset[str]:
        """Return the weights of kinds and relations that other clients do not have."""
        from flower_fgl.datasets.transforms.typed import held_parts

        schema = self.data.graph.schema
        assert schema is not None
        kinds: set[int] = set()
        relations: set[int] = set()
        if self.config.schema_align == "same":
            kinds, relations = schema.places_in(schema)
        elif self.config.schema_align == "name":
            held = held_parts(self.data.graph)
            shared = [one for one in held.relations if one not in schema.private]
            kinds, relations = held.only(held.node_types, shared).places_in(schema)
        return frozenset(unheld_names(self.state_shapes(), kinds, relations))

    def shared(self, state: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries of a state that are exchanged, without the local layers."""
        kept = self.local_names()
        return {name: entry for name, entry in state.items() if name not in kept}

    def receive(
        self,
        weights: Mapping[str, Tensor],
        build: Callable[[Client], Backbone] | None = None,
    ) -> Backbone:
        """Build the backbone with received weights, and with the client's own layers.

        The own layers, if there are any, are those of the model trained last, or the
        initial ones. ``build`` builds a network that is not the backbone and has no local
        layers.
        """
        kept = self.local_names()
        if build is None or kept:
            model = self.build_model(initialise=bool(kept))
        else:
            model = build(self)
        if kept:
            own = self.state.group("model")
            load_state(model, {name: t for name, t in own.items() if name in kept})
        load_state(model, weights)
        return model

    def train(
        self,
        model: Backbone,
        server_round: int,
        *,
        epochs: int | None = None,
        data_loss: DataLoss | None = None,
        penalty: Callable[[], Tensor] | None = None,
        after_epoch: Callable[[float], None] | None = None,
        purpose: str = "training",
    ) -> float:
        """Train a model in place on the client's training nodes; return the last loss.

        It is the mean of the last epoch. With ``check-every`` the model ends with the
        weights of the best validation score. With ``optimizer-state = "keep"`` the
        optimizer moments persist.

        ``epochs`` are by default ``local-epochs``, ``data_loss`` of the training nodes
        :meth:`task_loss`; ``penalty`` returns a term added to it. ``after_epoch`` is called
        with the mean loss after each epoch, and disables the validation checks. The round
        and ``purpose``, which distinguishes several trainings in one round, are part of the
        seeds of dropout and batches.
        """
        data_loss = data_loss or self.task_loss()
        text = self.config.num_neighbors
        limits = read_num_neighbors(text) if text else ()

        def run(
            optimizer: torch.optim.Optimizer, generator: torch.Generator, number: int
        ) -> float:
            return train_epochs(
                model,
                self.data.training,
                optimizer,
                epochs=number,
                batch_size=self.config.batch_size,
                data_loss=data_loss,
                penalty=penalty,
                generator=generator,
                num_neighbors=limits,
            )

        return self.train_by(
            run,
            model,
            server_round,
            epochs=epochs,
            after_epoch=after_epoch,
            purpose=purpose,
        )

    def task_loss(self) -> DataLoss | None:
        """Return the loss of the task, ``None`` for the plain cross-entropy.

        With ``class-weights`` it weighs the classes; with several labels per item it is
        the binary cross-entropy, and of numbers that of the setting ``loss``.
        """
        if self.data.training.labels.dim() == 2:
            if self.data.scale is not None:
                from flower_fgl.client_apps.runtime.target_scaling import number_loss

                return number_loss(self.config)
            from flower_fgl.core.label_scores import binary_loss

            return lambda logits, labels, index: binary_loss(logits, labels)
        if self.config.class_weights == "none":
            return None
        from flower_fgl.core.label_scores import balanced_weights

        data = self.data  # the weights follow from the client's own training labels
        counts = torch.bincount(data.training.labels, minlength=data.num_classes)
        weight = balanced_weights(counts)
        return lambda logits, labels, index: functional.cross_entropy(
            logits, labels, weight=weight
        )

    def train_by(
        self,
        run: Callable[[torch.optim.Optimizer, torch.Generator, int], float],
        model: Backbone,
        server_round: int,
        *,
        epochs: int | None = None,
        after_epoch: Callable[[float], None] | None = None,
        purpose: str = "training",
        optimizer: torch.optim.Optimizer | None = None,
    ) -> float:
        """Train like :meth:`train`, with the caller's implementation of an epoch.

        ``run`` takes the model's optimizer, a generator for batches and a number of
        epochs (at least one). It trains for these epochs and returns the mean loss of the
        last one. The state of the caller's own ``optimizer`` is not kept.
        """
        is_given = optimizer is not None
        optimizer = optimizer or make_optimizer(model, self.config)
        if not is_given:
            self.restore_moments("optimizer", model, optimizer)
        batches = "batches" if purpose == "training" else f"batches of {purpose}"
        generator = self.generator(server_round, batches)
        loss = float("nan")
        epochs = self.config.local_epochs if epochs is None else epochs
        check_every = self.config.check_every
        with seeded(self.seed(server_round, purpose), self.device):
            if after_epoch:
                for _ in range(epochs):
                    loss = run(optimizer, generator, 1)
                    after_epoch(loss)
            elif check_every:
                loss = train_and_check(
                    model,
                    lambda number: run(optimizer, generator, number),
                    lambda: self.validate(model),
                    epochs=epochs,
                    check_every=check_every,
                    patience=self.config.patience,
                    score=self.config.main_score,
                )
            elif epochs:
                loss = run(optimizer, generator, epochs)
        if not is_given:
            self.keep_moments("optimizer", model, optimizer)
        return loss

    def restore_moments(
        self, group: str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Restore moments of :meth:`keep_moments`, if ``optimizer-state`` keeps them."""
        if self.config.optimizer_state == "keep":
            restore_optimizer(model, optimizer, self.state.group(group))

    def keep_moments(
        self, group: str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Store an optimizer's moments in a group, if ``optimizer-state`` keeps them."""
        if self.config.optimizer_state == "keep":
            self.state.set_group(group, optimizer_tensors(model, optimizer))

    @torch.inference_mode()
    def validate(self, model: Backbone) -> float:
        """Return a model's main score on the validation nodes, NaN if there are none.

        It is the accuracy, or the area under the ROC curve where ``config.main_score``
        says so; this area is NaN if all validation nodes have one class.
        """
        if self.config.main_score != "accuracy" or self.config.predicts == LABELS:
            return self.evaluate(model)["val"].selected(self.config.main_score)
        model.eval()
        data = self.data
        hits = total = 0
        for inputs, y, masks in zip(
            data.inputs, data.labels, data.columns, strict=True
        ):
            if "val" in masks:
                mask = masks["val"] & (y >= 0)
                found = int(mask.sum())
                if found:
                    hits += int((model(inputs).argmax(dim=1) == y)[mask].sum())
                    total += found
        return hits / total if total else math.nan

    @torch.inference_mode()
    def evaluate(
        self,
        model: Backbone,
        known_logits: Tensor | None = None,
        *,
        calibration: Calibration | None = None,
        keeps: dict[str, tuple[Tensor, Tensor]] | None = None,
        around: dict[str, Surroundings] | None = None,
    ) -> dict[str, AnyScores]:
        """Score a model on every column: ``val``, ``test`` and those of the setting.

        Graph classification, owners, and datasets with rare classes add the areas under
        the ROC curve and the precision-recall curve. A positive class adds its own
        scores, at a threshold that is chosen on ``val``. The few-shot setting adds the
        column ``test_masked``: the test nodes, scored over the client's own classes only.
        ``calibration`` adds scores of the probabilities and sets: by default those that
        the validation items give.

        ``known_logits`` (N, C) are predictions of the model for the training graph.
        ``keeps`` receives outputs and labels of the labelled items of each column, and
        ``around`` the graph of each column whose sets depend on neighbours.
        """
        model.eval()
        data = self.data
        empty: AnyScores = EMPTY
        if data.scale is not None:
            from flower_fgl.core.regression import NumberScores

            empty = NumberScores.empty(tuple(data.scale.std.tolist()))
        scores = dict.fromkeys(data.sizes, empty)
        is_few_shot = self.config.setting == "few-shot"
        if is_few_shot:
            scores[MASKED] = EMPTY
        is_own = self.config.calibration == "owner" and keeps is None
        is_calibrated = is_own or calibration is not None
        items: dict[str, tuple[Tensor, Tensor]] = {} if keeps is None else keeps
        needs_items = is_calibrated or keeps is not None
        is_diffused = is_own or around is not None
        is_diffused = is_diffused and self.config.conformal_score == DIFFUSED
        around = {} if around is None else around
        for inputs, y, masks in zip(
            data.inputs, data.labels, data.columns, strict=True
        ):
            names = [name for name in masks if data.sizes[name]]
            if names and known_logits is not None and inputs is data.inputs[0]:
                logits = known_logits
            elif names:
                wanted = torch.stack([masks[name] for name in names]).any(0)
                if is_diffused:
                    wanted = torch.ones_like(wanted)
                logits = model.predict(inputs, wanted)
            for name in names:
                scores[name] = self._score(logits, y, masks[name], inputs)
                if needs_items or (self.config.positive_class and y.dim() == 1):
                    known = y >= 0 if y.dim() == 1 else ~y.isnan().all(dim=1)
                    chosen = masks[name] & known
                    items[name] = logits[chosen], y[chosen]
                    if is_diffused:
                        around[name] = self._surroundings(logits, inputs, chosen)
            if is_few_shot and "test" in names:
                own = logits.masked_fill(~data.own_classes, -math.inf)
                scores[MASKED] = self._plain_score(own, y, masks["test"])
        if self.config.positive_class in data.graph.target.names:
            from flower_fgl.core.label_scores import score_positive_class

            positive = data.graph.target.names.index(self.config.positive_class)
            k = self.config.precision_k
            plain = cast(dict[str, Scores], scores)  # of classes
            scores = {**score_positive_class(plain, items, positive, k=k)}
        if is_calibrated:
            from flower_fgl.client_apps.runtime.calibration import score_calibrated

            found = calibration or self._calibrate(items, around)
            draw, scale = self.conformal_draws, data.scale
            scores = score_calibrated(scores, items, found, scale, draw, around)
        return scores

    def calibrate(self, model: Backbone) -> Calibration:
        """Calibrate a model with the client's validation items."""
        items: dict[str, tuple[Tensor, Tensor]] = {}
        around: dict[str, Surroundings] = {}
        self.evaluate(model, keeps=items, around=around)
        return self._calibrate(items, around)

    def validation_items(self, model: Backbone) -> tuple[Tensor, Tensor] | None:
        """Return outputs and labels of the validation items, ``None`` without any."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        self.evaluate(model, keeps=found)
        return found.get("val")

    def _calibrate(
        self,
        items: Mapping[str, tuple[Tensor, Tensor]],
        around: Mapping[str, Surroundings],
    ) -> Calibration:
        """Calibrate by outputs and labels of the column ``val``, if there is one."""
        from flower_fgl.client_apps.runtime.calibration import calibrate

        draw, scale = self.conformal_draws, self.data.scale
        return calibrate(items.get("val"), self.config, scale, draw, around.get("val"))

    def _surroundings(
        self, logits: Tensor, inputs: GraphInput, chosen: Tensor
    ) -> Surroundings:
        """Return the graph (N nodes) of chosen items (N,), bool, with its own draws."""
        from flower_fgl.algorithms.calibration import Surroundings

        u = self.conformal_draws("graph", len(logits))
        return Surroundings(logits, inputs.edge_index, u, chosen.nonzero().flatten())

    def conformal_draws(self, column: str, number: int) -> Tensor:
        """Return the draws (n,) for conformal scores, the same for a column each time."""
        generator = self.generator(0, f"conformal {column}")
        u = torch.rand(number, generator=generator, dtype=torch.float64)
        return u.to(self.device)

    def _score(
        self, logits: Tensor, y: Tensor, mask: Tensor, inputs: GraphInput
    ) -> AnyScores:
        """Score the items of one column by the scores of the task."""
        config, data = self.config, self.data
        if data.scale is not None:
            from flower_fgl.core.regression import score_numbers

            return score_numbers(data.scale.restore(logits), y, mask, data.scale.std)
        if y.dim() == 2:
            from flower_fgl.core.label_scores import score_targets

            absent = cast(AbsentClasses, config.absent_classes)
            return score_targets(logits, y, mask, absent_classes=absent)
        plain = self._plain_score(logits, y, mask)
        if inputs.pairs is not None and inputs.pair_x is None:
            return score_links(plain, logits, y, mask, k=config.link_k)
        if inputs.batch is not None or config.owners or config.main_score == "auroc":
            return score_areas(plain, logits, y, mask, data.num_classes)
        return plain

    def _plain_score(self, logits: Tensor, y: Tensor, mask: Tensor) -> Scores:
        """Score classes without areas under curves."""
        absent = cast(AbsentClasses, self.config.absent_classes)  # checked by choices
        return score(logits, y, mask, self.data.num_classes, absent_classes=absent)


@lru_cache(maxsize=64)
def _models_in_turn(names: str) -> tuple[str, ...]:
    """Split the names of backbones once: every message asks for one of them."""
    return tuple(split_models(names))
