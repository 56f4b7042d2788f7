"""O-pFGL's server half: merge class statistics, generate a pseudo-graph from them.

==========================  ==============================================
symbol                      argument or attribute
==========================  ==============================================
μ_k^c, s_k^{2c}, N_k^c      ``LocalStatistics.statistics`` of client k
μ^c, s^{2c}, N^c            ``statistics`` of :meth:`OPFGL.make_graph`
G' = (A', X', Y')           ``OPFGL.pseudo.graph``
g_θ                         ``LinkPredictor``
T_c, p                      ``opfgl.server-steps``, ``opfgl.node-share``
δ                           ``threshold`` of :func:`link_weights`
==========================  ==============================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from flower_fgl.algorithms.opfgl.class_statistics import (
    ClassStatistics,
    merge_statistics,
    statistics_of_sums,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import (
    PseudoGraph,
    generate,
    pseudo_counts,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.methods.opfgl import OPFGLSettings
from flower_fgl.protocols.opfgl import (
    GraphDownload,
    LocalStatistics,
    StatisticsSpec,
    no_pseudo_graph,
)
from flower_fgl.strategies.base import FglStrategy, Upload

__all__ = ["OPFGL"]

log = logging.getLogger(__name__)
MOST_NODES = 5000
"""Largest pseudo-graph: its dense adjacency of s² numbers then takes 100 MB."""
LOG_STEPS = 500
"""Steps of the generator between two lines of the log."""


class OPFGL(FglStrategy):
    """Collect statistics, send a pseudo-graph, and let every client personalize.

    Notes
    -----
    1. The single round has two exchanges. The first collects the uploads; the second
       sends the download and returns scores, no payload.
    2. A client whose statistics do not arrive, or are impossible, is left out of the
       second exchange. It evaluates the model of its stage 1.
    3. The generator runs on ``device``, as the clients do. A server without that device
       runs it on the CPU and logs a warning. X' and g_θ start from the same draws on every
       device.
    """

    config: RunConfig[OPFGLSettings]
    down = GraphDownload
    up = LocalStatistics
    scores_uploads = False
    kept = ("pseudo", "contributors")

    def prepare(self) -> None:
        """Start without a pseudo-graph; say what the default floor withholds."""
        if (least := self.config.min_class_count) > 1:
            log.info(
                "min-class-count = %d: clients withhold the statistics of classes with "
                "fewer nodes. The published method withholds none (min-class-count = 1).",
                least,
            )
        self.pseudo = GraphDownload(no_pseudo_graph(self.federation.num_features))
        self.contributors: list[int] = []

    def download(self, server_round: int, partition_id: int) -> GraphDownload:
        """Send the pseudo-graph; an empty one before it is generated."""
        return self.pseudo

    def upload_spec(self, partition_id: int) -> StatisticsSpec:
        """Expect at most the statistics of every class, (h + 1)·d wide."""
        hops = self.config.method_config.depth + 1
        client = self.federation.clients[partition_id]
        return StatisticsSpec(
            self.federation.num_classes,
            hops * self.federation.num_features,
            client.num_nodes,
            client.num_train,
        )

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Merge the clients' statistics, Eq. (9), and generate the pseudo-graph."""
        every = [upload.payload.statistics for upload in uploads.values()]
        statistics = merge_statistics(every, self.config.method_config.denominator)
        self.contributors = list(uploads)
        self.pseudo = GraphDownload(self.make_graph(statistics))

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Recover the pooled statistics, Eqs. (14) and (15), generate the pseudo-graph."""
        self.check_counts(sums, weights)
        statistics = statistics_of_sums(sums, self.config.method_config.denominator)
        self.contributors = list(weights)
        self.pseudo = GraphDownload(self.make_graph(statistics))

    def check_counts(
        self, sums: Mapping[str, Tensor], weights: Mapping[int, float]
    ) -> None:
        """Compare the sums of the counts with the descriptions of the clients."""
        clients = [self.federation.clients[pid] for pid in weights]
        most = {
            "count": sum(client.num_nodes for client in clients),
            "labelled": sum(client.num_train for client in clients),
        }
        for name, limit in most.items():
            counts = sums[name].round()
            if float(counts.min()) < 0 or float(counts.sum()) > limit:
                raise PayloadError(
                    f"The sums of {name} must be at least 0 and add up to at most {limit}, "
                    f"as the clients described, got {counts.tolist()}."
                )
        owners = sums["owners"].round()
        if float(owners.min()) < 0 or float(owners.max()) > len(clients):
            raise PayloadError(
                f"A class must have 0 to {len(clients)} owners, got {owners.tolist()}."
            )
        if bool((sums["labelled"].round() > sums["count"].round()).any()):
            raise PayloadError("A class has more labelled nodes than nodes.")
        if float(sums["squares"].min()) < -0.5:  # they are rounded
            raise PayloadError("Sums of squares must not be negative.")

    def to_blame(self, uploads: Mapping[int, Upload]) -> dict[int, str]:
        """Return the clients whose counts alone make the pseudo-graph too large."""
        share = self.config.method_config.node_share or None
        numbers = {
            pid: pseudo_counts(u.payload.statistics.labelled_count, share=share)
            for pid, u in uploads.items()
        }
        found = {pid: int(number.sum()) for pid, number in numbers.items()}
        return {
            pid: f"its counts ask for {number} pseudo-nodes"
            for pid, number in found.items()
            if number > MOST_NODES
        } or super().to_blame(uploads)

    def make_graph(self, statistics: ClassStatistics) -> PseudoGraph:
        """Generate the pseudo-graph from pooled statistics μ, s² and N, Eqs. (10)-(13).

        Raises a PayloadError if no class was uploaded, the statistics do not fit, or the
        pseudo-graph would have more than ``MOST_NODES`` nodes.
        """
        method_config = self.config.method_config
        missing = [
            name
            for name, count in zip(
                self.federation.target.names, statistics.count.tolist(), strict=True
            )
            if not count
        ]
        if missing:
            log.warning(
                "No client uploaded statistics of %s: left out of the pseudo-graph.",
                ", ".join(missing),
            )
        device = server_device(self.config.device)
        share = method_config.node_share or None
        number = pseudo_counts(statistics.labelled_count, share=share)
        if int(number.sum()) > MOST_NODES:
            raise PayloadError(
                f"The pseudo-graph would have {int(number.sum())} nodes, at most "
                f"{MOST_NODES} are possible: set a smaller opfgl.node-share."
            )
        try:
            graph, _ = generate(
                statistics.mean.to(device),
                statistics.variance.to(device),
                statistics.count.to(device),
                number.to(device),
                num_features=self.federation.num_features,
                depth=method_config.depth,
                settings=method_config,
                generator=torch_generator(self.config.seed, 1, SERVER, "pseudo-graph"),
                progress=log_progress,
            )
        except PayloadError as error:
            raise PayloadError(
                f"The pseudo-graph cannot be generated: {error}"
            ) from error
        return PseudoGraph(
            graph.features.cpu(), graph.labels.cpu(), graph.adjacency.cpu()
        )

    def complete_round(self, server_round: int) -> bool:
        """Send the pseudo-graph; clients train both stages and reply with scores."""
        # clients that sent statistics have no model yet
        return self.train_again(server_round, self.contributors, "personalise")


def server_device(name: str) -> torch.device:
    """Return the device of the setting ``device``, the CPU if the server lacks it."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        log.warning(
            'device = "%s", but torch sees %d GPUs on the server: it generates the '
            "pseudo-graph on its CPU.",
            name,
            torch.cuda.device_count(),
        )
        return torch.device("cpu")
    return device


def log_progress(step: int, steps: int, loss: float) -> None:
    """Log a line every ``LOG_STEPS`` steps and at the end."""
    if step % LOG_STEPS == 0 or step == steps:
        log.info("Pseudo-graph: step %d of %d, loss %.5f", step, steps, loss)
