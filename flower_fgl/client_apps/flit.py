"""Client half of FLIT and FLIT+: FedAvg that weighs items by their difficulty."""

import torch
from torch import Tensor

from flower_fgl.algorithms import flit
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.core.regression import mean_of_known
from flower_fgl.methods.flit import FLITSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FLITClientApp", "WeighedLoss"]

Client = AnyClient[FLITSettings]


class FLITClientApp(FedAvgClientApp):
    """Train with weighed items; the rest is FedAvg.

    Notes
    -----
    1. The published code clips the gradient to a norm of 1: set ``clip-gradient = 1``.
    2. Round 1 trains with equal weights, as in the published code. Fine-tuning does too.
    """

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train from the received weights, which also give the loss to compare with."""
        if server_round == 1:
            return super().fit(client, server_round, download)
        model = client.receive(download.tensors, self.build)
        weighed = WeighedLoss(client, model, server_round)
        loss = client.train(model, server_round, data_loss=weighed)
        upload = Weights(client.shared(model.state_dict()))
        return Fit(model, upload, loss, terms=weighed.terms())


class WeighedLoss:
    """The loss of the steps of one round: mean of ω·ℓ, with FLIT+ of ω·(ℓ + v).

    ``model`` is the network in training and holds the received weights at first.

    Notes
    -----
    1. ℓ^g and v^g are computed once a round and without dropout; the published code
       computes them with dropout.
    2. All passes of v are without dropout. With it, v would mostly be the difference
       between two drawn masks.
    """

    def __init__(self, client: Client, model: Backbone, server_round: int) -> None:
        self.config, self.model = client.config, model
        self.settings: FLITSettings = client.config.method_config
        self.inputs = client.data.training.inputs
        self.kind = client.data.graph.target.kind
        self.generator = client.generator(server_round, "virtual")
        self.is_virtual = self.settings.variant == "flit+"
        index, labels = client.data.training.index, client.data.training.labels
        model.eval()
        with torch.no_grad():
            graph, rows = self.part(index)
            own, is_known = self.losses(model(graph)[rows], labels)
        inputs = self.inputs
        size = inputs.num_nodes if inputs.batch is None else inputs.num_graphs
        shape = (size, own.shape[1])  # of all items, by their number
        self.received = own.new_zeros(shape).index_copy_(0, index, own)
        self.received_virtual = own.new_zeros(shape)
        if self.is_virtual:
            virtual = self.virtual(index).detach()
            self.received_virtual.index_copy_(0, index, virtual)
        self.mean = own.new_full(shape[1:], torch.nan)
        # of the last step of each item, NaN where unknown
        self.omega = own.new_full(shape, torch.nan)
        self.is_worse = is_known.new_zeros(shape)

    def part(self, index: Tensor) -> tuple[GraphInput, Tensor]:
        """Return the graphs that some items need, and the items' rows of the output."""
        inputs = self.inputs
        if inputs.batch is None or len(index) == inputs.num_graphs:
            return inputs, index
        return inputs.select(index), torch.arange(len(index), device=index.device)

    def losses(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return ℓ (b, T), and which entries are known."""
        return flit.item_losses(
            output,
            labels,
            kind=self.kind,
            loss=self.config.loss,
            delta=self.config.huber_delta,
        )

    def virtual(self, index: Tensor) -> Tensor:
        """Return v (b, T) of some items."""
        self.model.eval()
        graph, rows = self.part(index)
        noise = [
            (torch.rand(shape, generator=self.generator) - 0.5).to(index.device)
            for shape in flit.shift_shapes(self.model, graph)
        ]
        return flit.virtual_loss(
            lambda shifts: flit.shifted_output(self.model, graph, shifts)[rows],
            noise,
            kind=self.kind,
        )

    def __call__(self, output: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Return the loss of a step, as :data:`DataLoss`."""
        settings = self.settings
        own, is_known = self.losses(output, labels)
        if not bool(is_known.any()):
            return own.new_zeros(())  # without gradient: the batch makes no step
        phi, total = flit.difficulty(own, self.received[index]), own
        if self.is_virtual:
            virtual = self.virtual(index)
            self.model.train()
            more = flit.difficulty(virtual, self.received_virtual[index])
            phi, total = phi + settings.virtual_weight * more, own + virtual
        self.mean = flit.running_mean(self.mean, phi, is_known)
        omega = flit.item_weights(phi, self.mean, gamma=settings.gamma)
        self.omega[index] = omega.detach().masked_fill(~is_known, torch.nan)
        self.is_worse[index] = own.detach() > self.received[index]
        is_equal = self.config.target_weight == "targets"
        return mean_of_known(omega * total, is_known, by_target=is_equal)

    def terms(self) -> dict[str, float]:
        """Return mean and 90 % quantile of ω, and the share of entries with ℓ > ℓ^g.

        They are of each item's last step. The quantile is the weight of one item, and is
        left out with ``min-class-count`` above 1.
        """
        seen = ~self.omega.isnan()
        if not bool(seen.any()):
            return {}
        values = self.omega[seen]
        found = {
            "weight": float(values.mean()),
            "worse": float(self.is_worse[seen].float().mean()),
        }
        if self.config.min_class_count <= 1:
            place = -(-9 * len(values) // 10)  # 90 % of the entries, rounded up
            found["weight-90"] = float(values.kthvalue(place).values)
        return found
