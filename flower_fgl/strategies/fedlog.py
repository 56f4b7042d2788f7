"""FedLoG's server half: average models, aggregate synthetic nodes and generators.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
φ, θ^H, θ^T            ``FedLog.weights``
r_k^c                  ``FedLog.rates[k][c]``
X^g, X_k^H             ``FedLog.nodes``, ``FedLog.last_nodes[k]``
PG^1 … PG^C            ``FedLog.prompts``
=====================  ==================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog.prompts import blend_generators
from flower_fgl.algorithms.fedlog.synthetic import (
    aggregation_weights,
    blend_nodes,
    permute_slots,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.protocols.fedlog import (
    PRETRAIN,
    FedLogDownload,
    FedLogShapes,
    FedLogUpload,
    PromptUpload,
)
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.fedavg import build_own

__all__ = ["FedLog"]

log = logging.getLogger(__name__)


class FedLog(FglStrategy):
    """Average encoders and classifiers, and aggregate the clients' learnable nodes.

    Notes
    -----
    1. The exchange before round 1 collects class rates and prompt generators; the run
       folder records it as round 0. A client that failed there has weight 0 in Eqs. (4)
       and (15) if others have the class.
    2. The paper sends the generators at once. Here a client receives them with the first
       synthetic nodes, from round 2 on. They are sent again until the client replies, and
       after each failure, since the client may have lost its state.
    3. Clients evaluate the models they trained. The averaged model has no learnable
       nodes and is not evaluated.
    """

    config: RunConfig[FedLogSettings]
    down = FedLogDownload
    up = FedLogUpload
    kept = ("weights", "nodes", "last_nodes", "rates", "prompts", "equipped")

    def prepare(self) -> None:
        """Initialize φ and θ; unless resumed, let the clients train their generators."""
        config, federation = self.config, self.federation
        model = next(iter(federation.clients.values())).model
        with seeded(derive_seed(config.seed, 0, SERVER, "init")), torch.no_grad():
            network = build_own(config, federation, model)
        self.shapes = FedLogShapes.of(network, config.method_config)
        if config.upload_noise:  # each noisy rate is clamped to [0, 1] at most
            self.shapes = replace(self.shapes, most=self.shapes.num_classes)
        self.weights: Mapping[str, Tensor] = network.shared_state()
        self.nodes: Tensor | None = None
        self.last_nodes: dict[int, Tensor] = {}
        self.rates: dict[int, Tensor] = {}
        self.prompts: Mapping[str, Tensor] = {}
        self.equipped: list[int] = []  # clients that have the generators
        self.sent = FedLogDownload()
        hides_rates = (
            config.method_config.lg and config.method_config.class_rate_noise != "none"
        )
        if hides_rates and config.share_class_counts:
            log.warning(
                "fedlog.class-rate-noise = %s adds noise to the class rates, but the "
                "clients also share exact class counts. Set share-class-counts = false "
                "to hide them.",
                config.method_config.class_rate_noise,
            )
        if config.method_config.lg and not self.is_resumed:
            self.pretrain()
        self.sent = FedLogDownload(self.weights)

    def pretrain(self) -> None:
        """Collect class rates and PG_k, and average PG^c: round 0."""
        able, least = self.federation.trainable, max(1, self.config.min_replies)
        with self.phase(PRETRAIN, 0, min_replies=least) as log:
            messages = self.train_messages(0, able, action=PRETRAIN, is_scored=False)
            uploads = self.read_uploads(self.messenger.exchange(messages), PromptUpload)
            self.loop.trained.clear()  # no client has a model yet
        if len(uploads) < least:
            is_plain = self.shapes.prompts is None
            what = "class rates" if is_plain else "a prompt generator"
            raise RunError(f"Too few clients sent {what}. {log.why_failed()}")
        self.rates = {pid: upload.payload.rates for pid, upload in uploads.items()}
        if self.shapes.prompts is not None:
            weights = aggregation_weights(torch.stack(list(self.rates.values())))
            self.prompts = blend_generators(
                [upload.payload.prompts for upload in uploads.values()], weights
            )

    def download(self, server_round: int, partition_id: int) -> FedLogDownload:
        """Send φ, θ and X^g, and the generators to clients that lack them."""
        has_them = partition_id in self.equipped and partition_id in self.loop.trained
        if self.nodes is None or has_them or not self.prompts:
            return self.sent
        return self.first

    def scoring_download(self, server_round: int, partition_id: int) -> FedLogDownload:
        """Send φ, θ and X^g only: just the training uses the generators."""
        return self.sent

    def upload_spec(self, partition_id: int) -> FedLogShapes:
        """Expect the shapes of the network."""
        return self.shapes

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average φ and θ, and compute X^g by Eq. (4) from all clients' last nodes."""
        if self.nodes is not None:
            self.equipped = sorted({*self.equipped, *uploads})
        payloads = {pid: upload.payload for pid, upload in uploads.items()}
        self.weights = weighted_mean(
            [payload.weights for payload in payloads.values()],
            [upload.num_examples for upload in uploads.values()],
        )
        if self.shapes.nodes is not None:
            self.last_nodes |= {pid: p.nodes for pid, p in payloads.items()}
            ordered = dict(sorted(self.last_nodes.items()))
            self.nodes = self.condense(server_round, ordered)
        self.restored()

    def record_round(self) -> None:
        """Record the round; clients that failed receive the generators again."""
        failed = {failure.partition_id for failure in self.loop.log.failures}
        self.equipped = [pid for pid in self.equipped if pid not in failed]
        super().record_round()

    def condense(self, server_round: int, nodes: Mapping[int, Tensor]) -> Tensor:
        """Compute X^g of shape (C·s, d) from all clients' last nodes, by partition-id."""
        method_config, seed = self.config.method_config, self.config.seed
        unknown = torch.zeros(self.shapes.num_classes)
        rates = torch.stack([self.rates.get(pid, unknown) for pid in nodes])
        known = torch.tensor([pid in self.rates for pid in nodes])
        stacked = torch.stack(list(nodes.values()))
        if method_config.permute_slots:
            generator = torch_generator(seed, server_round, SERVER, "slots")
            stacked = permute_slots(stacked, self.shapes.num_classes, generator)
        is_tail = method_config.synthetic_mode.startswith("T")
        weights = aggregation_weights(rates, known, tail_classes=is_tail)
        return blend_nodes(stacked, weights)

    def restored(self) -> None:
        """Build the two downloads: with the generators, and without them."""
        self.sent = FedLogDownload(self.weights, self.nodes)
        self.first = FedLogDownload(self.weights, self.nodes, self.prompts)
