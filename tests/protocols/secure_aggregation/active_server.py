"""A dishonest server that plays its messages against real client halves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.nn import build_model, state_shapes
from flower_fgl.protocols.base import CONFIG
from flower_fgl.protocols.describe import Description
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.secure_aggregation.keys import (
    KeyAgreement,
    add_masks,
    combine,
    derive,
    mask_stream,
    tag,
    view_digest,
)
from flower_fgl.protocols.secure_aggregation.messages import (
    Confirmations,
    MaskedUpload,
    Offer,
    Peers,
    Reveal,
    Roster,
    Survivors,
    Tags,
    from_bytes,
    to_bytes,
)
from flower_fgl.protocols.secure_aggregation.quantization import (
    Vector,
    decode,
    num_entries,
)
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid
from tests.support.short_runs import SMALL

__all__ = ["RUN", "ActiveServer", "Refused"]

RUN = 9
Lists = Mapping[int, list[int]]


class Refused(Exception):  # noqa: N818 (not an error of the server)
    """A client refused to answer."""


class ActiveServer:
    """Server that may send each client other rosters, peers, survivors and settings.

    Parameters
    ----------
    count : int
        Number of clients, real client halves of FedAvg in this process.
    settings : mapping of int to mapping, optional
        Settings that single clients receive, by partition-id.
    node_configs : mapping of int to mapping, optional
        Additions to the node config of single clients.
    """

    def __init__(
        self,
        count: int,
        settings: Mapping[int, Mapping[str, Any]] | None = None,
        node_configs: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        secure: bool = True,
        **common: Any,
    ) -> None:
        self.count = count
        self.common = common
        # without optimizer moments, a repeated round gives the same upload
        base = {**SMALL, "weight_by": "equal", "optimizer_state": "reset", **common}

        def config(own: Mapping[str, Any]) -> dict[str, Any]:
            return run_config_of(
                method="fedavg", dataset="synthetic", clients=count, seed=0,
                settings={**base, "secure_aggregation": secure, **own},
            )  # fmt: skip

        self.memory = MemoryStates()
        app = DispatchingClientApp(Session(memory=self.memory))
        self.grid = LocalGrid(app, count, config({}), run_id=RUN)
        self.nodes = list(self.grid.contexts)
        for pid, own in (settings or {}).items():
            self.grid.contexts[self.nodes[pid]].run_config = config(own)
        for pid, more in (node_configs or {}).items():
            self.grid.contexts[self.nodes[pid]].node_config |= more
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            model = build_model(
                "gcn", in_channels=8, hidden_channels=8, num_outputs=3, num_layers=2,
                dropout=0.5, readout=False,
            )  # fmt: skip
            self.weights = Weights(
                {k: v.detach() for k, v in model.state_dict().items()}
            )
        self.shapes = state_shapes(model)
        self.summands = Weights.summand_shapes(self.shapes)
        self.keys: dict[int, bytes] = {}
        self.offers: dict[int, Offer] = {}

    # ------------------------------------------------------------------ messages
    def ask(self, pid: int, kind: str, content: Any, server_round: int = 1) -> Any:
        records = RecordDict(dict(content))
        records[CONFIG] = ConfigRecord(
            {"server-round": server_round, "evaluate": False}
        )
        message = Message(records, self.nodes[pid], kind)
        (reply,) = self.grid.send_and_receive([message])
        if reply.has_error():
            raise Refused(reply.error.reason)
        return reply.content

    def describe(self) -> None:
        for pid in range(self.count):
            reply = self.ask(pid, "query.describe", {})
            self.keys[pid] = Description.from_record(reply).public_key

    def shares(
        self, pid: int, roster: Iterable[int], keys: Mapping[int, bytes] | None = None,
        server_round: int = 1,
    ) -> Offer:  # fmt: skip
        keys = keys or self.keys
        ids = sorted(roster)
        payload = Roster(torch.tensor(ids), from_bytes([keys[p] for p in ids]))
        reply = self.ask(pid, "query.secure_shares", payload.to_record(), server_round)
        return Offer.from_record(reply, {"N": len(ids)})

    def train(
        self, pid: int, peers: Iterable[int], rosters: Lists,
        weights: Weights | None = None, server_round: int = 1,
    ) -> Vector:  # fmt: skip
        ids = sorted(peers)
        sealed = [self.offers[p].sealed[sorted(rosters[p]).index(pid)] for p in ids]
        payload = Peers(torch.tensor(ids), torch.stack(sealed))
        content = {**payload.to_record(), **(weights or self.weights).to_record()}
        reply = self.ask(pid, "train", content, server_round)
        upload = MaskedUpload.from_record(reply, {"N": 1 + num_entries(self.summands)})
        return upload.vector.numpy().view(np.uint64).copy()

    def check(
        self, pid: int, alive: Iterable[int], server_round: int = 1
    ) -> dict[int, torch.Tensor]:
        ids = sorted(alive)
        payload = Survivors(torch.tensor(ids))
        reply = self.ask(pid, "query.secure_check", payload.to_record(), server_round)
        return dict(
            zip(ids, Tags.from_record(reply, {"N": len(ids)}).tags, strict=True)
        )

    def unmask(
        self, pid: int, peers: Iterable[int], codes: Mapping[int, torch.Tensor],
        server_round: int = 1,
    ) -> dict[int, bytes]:  # fmt: skip
        ids = sorted(peers)
        payload = Confirmations(
            torch.tensor(sorted(codes)), torch.stack([codes[p] for p in sorted(codes)])
        )
        reply = self.ask(pid, "query.secure_unmask", payload.to_record(), server_round)
        shares = Reveal.from_record(reply, {"N": len(ids)}).shares
        return dict(zip(ids, map(to_bytes, shares), strict=True))

    # ------------------------------------------------------------- a whole round
    def collect(
        self,
        rosters: Lists,
        peers: Lists,
        alive: Lists,
        *,
        helpers: Iterable[int] = (),
        weights: Mapping[int, Weights] | None = None,
        server_round: int = 1,
    ) -> tuple[dict[int, Vector], dict[int, dict[int, bytes]]]:
        """Run a round with other lists for each client; return uploads and shares.

        ``helpers`` are clients that give the server all their secrets.
        """
        for pid, roster in rosters.items():
            self.offers[pid] = self.shares(pid, roster, server_round=server_round)
        own = weights or {}
        vectors = {
            pid: self.train(pid, peers[pid], rosters, own.get(pid), server_round)
            for pid in peers
        }
        asked = [pid for pid in peers if pid not in set(helpers)]
        codes = {pid: self.check(pid, alive[pid], server_round) for pid in asked}
        revealed = {}
        for pid in asked:
            # the server makes up codes of clients that made none for this one
            made_up = torch.zeros(16, dtype=torch.uint8)
            received = {p: codes[p].get(pid, made_up) for p in asked}
            for helper in helpers:
                received[helper] = self.forge(helper, pid, sorted(alive[pid]))
            revealed[pid] = self.unmask(pid, peers[pid], received, server_round)
        return vectors, revealed

    def secrets(self, pid: int) -> dict[str, torch.Tensor]:
        context = self.grid.contexts[self.nodes[pid]]
        return self.memory.load(context, pid).group("secure")

    def forge(self, helper: int, pid: int, alive: list[int]) -> torch.Tensor:
        """Let a helper confirm to a client whatever that client was sent."""
        memory = self.secrets(helper)
        place = memory["peers"].tolist().index(pid)
        seen = view_digest(to_bytes(memory["seen"][0]), to_bytes(torch.tensor(alive)))
        key = derive(to_bytes(memory["pairs"][place]), "check", helper, pid)
        return from_bytes([tag(key, seen)])[0]

    # ------------------------------------------------------------------- opening
    def unmasked(
        self, vector: Vector, pid: int, seed: bytes, mask_secrets: Mapping[int, bytes]
    ) -> Vector:
        """Take a client's own mask and its pairwise masks off its upload."""
        total = vector - mask_stream(seed, len(vector))
        for other, secret in mask_secrets.items():
            key = KeyAgreement(secret, 1).key(
                to_bytes(self.offers[pid].mask_key), "mask", *sorted((pid, other))
            )
            add_masks(total, partition_id=other, pair_keys={pid: key})
        return total

    def sum_of(
        self, vectors: Mapping[int, Vector], revealed: Mapping[int, Mapping[int, bytes]],
        alive: list[int], need: int,
    ) -> Vector:  # fmt: skip
        """Unmask a sum as an honest server does; all clients of the roster are alive."""
        total = np.zeros_like(vectors[alive[0]])
        for pid in alive:
            shares = {p + 1: revealed[p][pid] for p in alive}
            total += vectors[pid] - mask_stream(rebuild(shares, need), len(total))
        return total

    def error(self, total: Vector, pid: int) -> float:
        """Return how far a decoded vector is from a client's true upload."""
        return self.error_of(self.decode(total), pid)

    def decode(self, total: Vector) -> dict[str, torch.Tensor]:
        return decode(total, {"witness": (), **self.summands}, fraction_bits=24)

    def error_of(self, found: Mapping[str, torch.Tensor], pid: int) -> float:
        truth = ActiveServer(self.count, secure=False, **self.common)
        reply = truth.ask(pid, "train", truth.weights.to_record())
        upload = Weights.from_record(reply, self.shapes).tensors
        return max(
            float((found[f"weights/{name}"].float() - tensor).abs().max())
            for name, tensor in upload.items()
        )


def rebuild(shares: Mapping[int, bytes], need: int) -> bytes:
    """Reconstruct a secret from the first ``need`` shares."""
    assert len(shares) >= need
    secret = combine(dict(sorted(shares.items())[:need]))
    assert secret is not None
    return secret
