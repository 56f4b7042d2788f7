"""Server half of FedPG: universal prototypes, personalized for each client.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
P_{c,h}^k              ``uploads[k, c, h]``
n_{c,h}^k              ``counts[k, c, h]``
P̈, GPG(·, θ)           ``PrototypeTrainer.generator``
P̃_{c,h}                ``universal[c, h]``
Ṗ_{c,h}^i              ``FedPG.personal[i].values[c, h]``
M, ε                   ``adaptive_margin``, ``fedpg.epsilon``
Δs                     ``fedpg.context-share``
α, λ                   ``fedpg.alpha``, ``fedpg.threshold``
L                      ``fedpg.hops``
=====================  ==================================================
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import (
    adaptive_margin,
    class_spread,
    contrastive_loss,
    draw_context,
    personalise_prototypes,
    topology_loss,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.methods.fedpg import FedPGSettings
from flower_fgl.protocols.prototypes import (
    CountedTable,
    LocalPrototypes,
    Prototypes,
    no_prototypes,
)
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.fedproto import MARGIN_LIMIT, PrototypeTrainer

__all__ = ["FedPG"]

SERVER_WEIGHT_DECAY = 5e-4
"""Weight decay (Adam) of the prototype generator."""


class FedPG(FglStrategy):
    """Generate universal prototypes and blend them for each client.

    Notes
    -----
    1. All classes and hops are trained together, one Adam step per epoch. The paper's
       algorithm trains each for all its epochs in turn, which would pull the shared
       network back and forth.
    2. A client that was not sampled gets the newest universal prototypes when it takes
       part again. They are blended with the uploads of the last round and with its own
       last upload. Its own last upload does not affect other clients' prototypes.
    3. A client gets prototypes of the classes and hops that it uploaded last; before its
       first upload it gets none.
    4. The number ``fused-pairs`` of a round is the share of pairs of clients in which
       Eq. (5) blends the second client's prototype into the first one's.
    """

    config: RunConfig[FedPGSettings]
    down = Prototypes
    up = LocalPrototypes
    kept = ("generator", "latest", "personal")

    def prepare(self) -> None:
        """Draw the initial P̈ and θ."""
        method_config = self.config.method_config
        self.table = (
            self.federation.num_classes,
            method_config.hops + 1,
            self.config.hidden_channels,
        )
        self.trainer = PrototypeTrainer(
            self.table,
            seed=self.config.seed,
            is_normalised=True,
            lr=method_config.server_lr,
            weight_decay=SERVER_WEIGHT_DECAY,
            is_fused=True,
        )
        self.generator = self.trainer.generator
        self.optimizers = {"generator": self.trainer.optimizer}
        self.nothing = no_prototypes(self.table)
        self.latest: dict[int, LocalPrototypes] = {}
        self.personal: dict[int, Prototypes] = {}

    def download(self, server_round: int, partition_id: int) -> Prototypes:
        """Return Ṗ of the client; no prototypes before its first upload."""
        return self.personal.get(partition_id, self.nothing)

    def upload_spec(self, partition_id: int) -> CountedTable:
        """Return (C, L + 1, p): at most one prototype of each class and hop."""
        return CountedTable(self.table, self.federation.clients[partition_id].num_nodes)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Train on the uploads of the round, then personalize for all clients."""
        method_config = self.config.method_config
        received = {pid: upload.payload for pid, upload in uploads.items()}
        universal = self.generate(
            server_round, *LocalPrototypes.stack(received.values())
        )
        self.latest = dict(sorted((self.latest | received).items()))
        values, counts = LocalPrototypes.stack(self.latest.values())
        present = counts > 0
        if method_config.personalized:
            made, share = personalise_prototypes(
                universal,
                values,
                counts,
                alpha=method_config.alpha,
                threshold=method_config.threshold,
                is_fresh=torch.tensor([pid in uploads for pid in self.latest]),
            )
            self.log(**{"fused-pairs": share})
        else:
            made = universal * present[..., None]
        self.personal = {
            pid: Prototypes(made[k], present[k]) for k, pid in enumerate(self.latest)
        }

    def generate(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Minimise Eq. (4) for ``server-epochs`` and return P̃ (C, L + 1, p)."""
        method_config = self.config.method_config
        generator = torch_generator(self.config.seed, server_round, SERVER, "context")
        present = counts > 0
        share = method_config.context_share if method_config.rf_context else 0.0
        is_tgp = method_config.contrast == "tgp"
        margin = torch.zeros(())
        if method_config.ada_margin and is_tgp:
            margin = class_spread(uploads, counts, limit=MARGIN_LIMIT)
        elif method_config.ada_margin:
            margin = adaptive_margin(uploads, counts, epsilon=method_config.epsilon)
        shift = margin if method_config.contrast == "literal" else -margin

        def loss(made: Tensor) -> Tensor:
            members = draw_context(present, share=share, generator=generator)
            if is_tgp:
                return topology_loss(made, uploads, members, margin=margin)
            return contrastive_loss(
                made, uploads, members, shift=shift, tau=method_config.tau
            )

        return self.trainer.train(method_config.server_epochs, loss)

    def restored(self) -> None:
        """Make payloads of the latest uploads and of every Ṗ."""
        latest: Any = self.latest
        self.latest = {pid: LocalPrototypes(**own) for pid, own in latest.items()}
        personal: Any = self.personal
        self.personal = {pid: Prototypes(**own) for pid, own in personal.items()}
