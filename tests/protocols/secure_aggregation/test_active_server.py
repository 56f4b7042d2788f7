"""Attacks of a server that deviates from the protocol, against real client halves.

Each attack opened one client's upload to 3e-8 before clients checked what others had seen.
The tests named "control" switch the check off and show that the attack then opens it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict

from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.runtime.secure_aggregation import download_digest
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.core.errors import PayloadError
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.opfgl import GraphDownload
from flower_fgl.protocols.secure_aggregation import keys as key_functions
from flower_fgl.protocols.secure_aggregation.client import Member
from flower_fgl.protocols.secure_aggregation.history import SumHistory
from flower_fgl.protocols.secure_aggregation.identities import Identity, load_identity
from flower_fgl.protocols.secure_aggregation.messages import (
    Reveal,
    Tags,
    from_bytes,
    to_bytes,
)
from flower_fgl.protocols.secure_aggregation.quantization import Vector
from flower_fgl.protocols.secure_aggregation.server import SecureRound
from flower_fgl.simulation.local_grid import task_identity
from tests.protocols.secure_aggregation.active_server import (
    RUN,
    ActiveServer,
    Refused,
    rebuild,
)
from tests.support.owners import owner_graphs, run_owners

OPENED = 3e-8
"""A float32 weight of about 1, from fixed point with 24 bits."""
NOT_THE_SAME = "have seen the same roster, peers"


@pytest.fixture(autouse=True)
def _run() -> Iterator[None]:
    with task_identity(RUN):
        yield


def more_than_half(clients: int, share: float) -> int:
    """The former threshold with ``secure-threshold`` = 0.51."""
    return max(clients // 2 + 1, math.ceil(0.51 * clients - 1e-9))


def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients accept any confirmation, and the former threshold."""
    monkeypatch.setattr(key_functions, "is_tag", lambda *_: True)
    monkeypatch.setattr(key_functions, "threshold", more_than_half)


# ------------------------------------------------------------- (a) different rosters
A_ROSTERS = {
    0: [0, 1, 2], 1: [0, 1, 3, 4, 5], 2: [0, 1, 2],
    3: [1, 3, 4, 5], 4: [1, 3, 4, 5], 5: [1, 3, 4, 5],
}  # fmt: skip
A_ALIVE = {0: [0, 1], 1: [0, 1, 3], 3: [3, 4, 5], 4: [3, 4, 5], 5: [3, 4, 5]}


def open_by_rosters(server: ActiveServer) -> float:
    """Client 1 shares its mask key with clients that client 0 does not know of."""
    peers = {0: [0, 1], **{p: A_ROSTERS[p] for p in (1, 3, 4, 5)}}
    vectors, revealed = server.collect(A_ROSTERS, peers, A_ALIVE)
    seed = rebuild({1: revealed[0][0], 2: revealed[1][0]}, 2)
    secret = rebuild({p + 1: revealed[p][1] for p in (3, 4, 5)}, 3)
    return server.error(server.unmasked(vectors[0], 0, seed, {1: secret}), 0)


def test_clients_with_different_rosters_cannot_decrypt_shares() -> None:
    server = ActiveServer(6)
    server.describe()
    for pid, roster in A_ROSTERS.items():
        server.offers[pid] = server.shares(pid, roster)
    with pytest.raises(Refused, match="shares of client 1 cannot be decrypted"):
        server.train(0, A_ROSTERS[0], A_ROSTERS)
    for pid in (3, 4, 5):
        with pytest.raises(Refused, match="shares of client 1 cannot be decrypted"):
            server.train(pid, A_ROSTERS[3], A_ROSTERS)


def test_control_different_rosters_open_an_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_check(monkeypatch)
    monkeypatch.setattr(key_functions, "view_digest", lambda *_: bytes(32))
    server = ActiveServer(6)
    server.describe()
    assert open_by_rosters(server) <= OPENED


# --------------------------------------------------- (b) different peers and survivors
def open_by_lists(server: ActiveServer, need: int) -> float:
    """Client 0 masks with few peers, whose keys the others reveal."""
    everyone = list(range(7))
    peers = dict.fromkeys(everyone, everyone) | {0: everyone[:need]}
    alive = {0: peers[0]}
    for pid in everyone[1:]:
        rest = [p for p in reversed(everyone) if p not in (0, pid)]
        alive[pid] = sorted([0, pid, *rest[: need - 2]])
    vectors, revealed = server.collect(dict.fromkeys(everyone, everyone), peers, alive)
    seed = rebuild({p + 1: revealed[p][0] for p in everyone}, need)
    secrets = {
        other: rebuild(
            {
                p + 1: shares[other]
                for p, shares in revealed.items()
                if other in peers[p] and other not in alive[p]
            },
            need,
        )
        for other in peers[0][1:]
    }
    return server.error(server.unmasked(vectors[0], 0, seed, secrets), 0)


def test_clients_with_different_peers_and_survivors_reveal_nothing() -> None:
    server = ActiveServer(7)
    server.describe()
    with pytest.raises(Refused, match=NOT_THE_SAME):
        open_by_lists(server, 5)


def test_control_different_peers_and_survivors_open_an_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_check(monkeypatch)
    server = ActiveServer(7)
    server.describe()
    assert open_by_lists(server, 4) <= OPENED


def test_clients_with_different_survivors_only_reveal_nothing() -> None:
    server = ActiveServer(7)
    server.describe()
    everyone = list(range(7))
    same = dict.fromkeys(everyone, everyone)
    alive = {pid: sorted({pid, *everyone[:5]})[:6] for pid in everyone}
    with pytest.raises(Refused, match=NOT_THE_SAME):
        server.collect(same, same, alive)


# --------------------------------------------------- (c) a lower threshold than agreed
def open_by_threshold(server: ActiveServer, need: int) -> float:
    """Two groups of two clients see different survivors; two clients help the server."""
    everyone, helpers = list(range(6)), (4, 5)
    same = dict.fromkeys(everyone, everyone)
    without = everyone[-need:] if need < 6 else everyone
    alive = {0: everyone, 1: everyone, 2: without, 3: without}
    vectors, revealed = server.collect(same, same, alive, helpers=helpers)
    held = {p: bytes(server.secrets(p)["held"][0].numpy()) for p in helpers}
    seeds = {p + 1: revealed[p][0] for p in (0, 1)}
    keys = {p + 1: revealed[p][0] for p in (2, 3)}
    for pid, both in held.items():
        seeds[pid + 1], keys[pid + 1] = both[:33], both[33:]
    total = server.unmasked(vectors[0], 0, rebuild(seeds, need), {})
    # the key of client 0 itself gives all its pairwise masks
    agreement = key_functions.KeyAgreement(rebuild(keys, need), 1)
    for other in everyone[1:]:
        key = agreement.key(
            to_bytes(server.offers[other].mask_key), "mask", *sorted((0, other))
        )
        key_functions.add_masks(total, partition_id=other, pair_keys={0: key})
    return server.error(total, 0)


def test_two_of_six_clients_that_help_the_server_are_too_few() -> None:
    # the owners agreed on 1.0, but the server sends the clients the lowest share
    server = ActiveServer(6)
    server.describe()
    with pytest.raises(
        Refused, match=r"\[0, 1, 4, 5\] have seen the same.*5 are needed"
    ):
        open_by_threshold(server, 5)


def test_control_a_lower_threshold_opens_an_upload_despite_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_functions, "threshold", more_than_half)
    server = ActiveServer(6)
    server.describe()
    assert open_by_threshold(server, 4) <= OPENED


def test_clients_with_different_thresholds_reveal_nothing() -> None:
    server = ActiveServer(6, {0: {"secure_threshold": 0.67}}, secure_threshold=1.0)
    server.describe()
    everyone = list(range(6))
    same = dict.fromkeys(everyone, everyone)
    with pytest.raises(Refused, match=r"only the clients \[0\] have seen"):
        server.collect(same, same, same)


def test_a_client_refuses_a_share_below_the_range() -> None:
    server = ActiveServer(6)
    server.describe()
    context = server.grid.contexts[server.nodes[0]]
    context.run_config["secure-threshold"] = 0.51
    with pytest.raises(Refused, match="secure-threshold must be above 2/3"):
        server.shares(0, range(6))


# ------------------------------------------------------------------ (d) replayed rounds
def open_by_replay(server: ActiveServer, between: Any) -> float:
    """Sum all clients, then repeat the round without client 0."""
    everyone = list(range(4))
    totals = []
    for group in (everyone, everyone[1:]):
        same = dict.fromkeys(group, group)
        vectors, revealed = server.collect(same, same, same)
        totals.append(server.sum_of(vectors, revealed, group, 3))
        between()
    return server.error(totals[0] - totals[1], 0)


def test_an_answered_round_is_not_answered_again_after_a_new_describe() -> None:
    server = ActiveServer(4)
    server.describe()
    with pytest.raises(Refused, match="already sent a masked vector in round 1"):
        open_by_replay(server, server.describe)


def test_an_answered_round_is_not_answered_again_after_a_resume_of_the_same_run() -> (
    None
):
    server = ActiveServer(4)
    server.describe()

    def resume() -> None:
        for node in server.nodes:
            point = {"run-id": str(RUN), "server-round": 0, "is-restored": False}
            content = RecordDict({"config": ConfigRecord(point)})
            (reply,) = server.grid.send_and_receive(
                [Message(content, node, "query.resume")]
            )
            assert "does not rewind" in reply.error.reason

    with pytest.raises(
        Refused, match=r"answers every round once|already sent a masked"
    ):
        open_by_replay(server, resume)


def test_control_a_replayed_round_opens_an_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Member.join

    def join(member: Member) -> bytes:
        member.memory.clear()
        return original(member)

    no_history(monkeypatch)
    monkeypatch.setattr(Member, "join", join)
    monkeypatch.setattr(ClientState, "claim", lambda *_, **__: None)
    server = ActiveServer(4)
    server.describe()
    assert open_by_replay(server, server.describe) <= OPENED


@pytest.mark.parametrize("number", [-1, 0, 3])
def test_rounds_that_the_run_does_not_have_are_refused(number: int) -> None:
    server = ActiveServer(3)
    server.describe()
    with pytest.raises(Refused, match=f"rounds 1 to 2, got round {number}"):
        server.shares(0, range(3), server_round=number)


# ------------------------------------ two rounds with one download, all messages honest
QUIET = {"dropout": 0.0}
"""Then two rounds with one download give the same uploads."""
EVERYONE, OTHERS = [0, 1, 2, 3], [1, 2, 3]


def summed(
    server: ActiveServer,
    roster: list[int],
    alive: list[int],
    server_round: int,
    weights: Weights | None = None,
) -> Vector:
    """Return the sum over some clients of a roster, as an honest server gets it."""
    lists = dict.fromkeys(roster, roster)
    down = dict.fromkeys(roster, weights) if weights else None
    for pid in roster:
        server.offers[pid] = server.shares(pid, roster, server_round=server_round)
    own = down or {}
    vectors = {
        pid: server.train(pid, roster, lists, own.get(pid), server_round)
        for pid in roster
    }
    codes = {pid: server.check(pid, alive, server_round) for pid in alive}
    revealed = {
        pid: server.unmask(pid, roster, {p: codes[p][pid] for p in alive}, server_round)
        for pid in alive
    }
    total = server.sum_of(vectors, revealed, alive, 3)
    for lost in set(roster) - set(alive):
        secret = rebuild({p + 1: revealed[p][lost] for p in alive}, 3)
        agreement = key_functions.KeyAgreement(secret, server_round)
        keys = {
            pid: agreement.key(
                to_bytes(server.offers[pid].mask_key), "mask", *sorted((lost, pid))
            )
            for pid in alive
        }
        key_functions.add_masks(total, partition_id=lost, pair_keys=keys)
    return total


def open_by_two_rounds(
    server: ActiveServer, roster: list[int], weights: Weights | None = None
) -> float:
    """Subtract a sum without client 0 from a sum of all."""
    first = summed(server, EVERYONE, EVERYONE, 1)
    return server.error(first - summed(server, roster, OTHERS, 2, weights), 0)


def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients forget the sums that they helped to open."""
    monkeypatch.setattr(SumHistory, "add", lambda *_: None)


@pytest.mark.parametrize(
    ("roster", "match"),
    [
        (OTHERS, "answered an equal download under another roster"),
        # the roster is the same, but the server says that client 0 has dropped out
        (EVERYONE, "a sum of an equal download over other clients"),
    ],
)
def test_two_sums_of_one_download_over_other_clients_are_refused(
    roster: list[int], match: str
) -> None:
    server = ActiveServer(4, **QUIET)
    server.describe()
    with pytest.raises(Refused, match=match):
        open_by_two_rounds(server, roster)


@pytest.mark.parametrize("roster", [OTHERS, EVERYONE])
def test_control_two_sums_of_one_download_open_an_upload(
    monkeypatch: pytest.MonkeyPatch, roster: list[int]
) -> None:
    no_history(monkeypatch)
    server = ActiveServer(4, **QUIET)
    server.describe()
    assert open_by_two_rounds(server, roster) <= 2 * OPENED


def test_a_download_is_summed_again_over_the_same_clients() -> None:
    server = ActiveServer(4, **QUIET)
    server.describe()
    first = summed(server, EVERYONE, EVERYONE, 1)
    assert np.array_equal(first, summed(server, EVERYONE, EVERYONE, 2))


def test_a_round_without_a_sum_leaves_no_history() -> None:
    server = ActiveServer(4, **QUIET)
    server.describe()
    for pid in EVERYONE:
        server.offers[pid] = server.shares(pid, EVERYONE)
    for pid in OTHERS:
        server.train(pid, EVERYONE, dict.fromkeys(EVERYONE, EVERYONE))
    total = summed(server, OTHERS, OTHERS, 2)
    assert float(server.decode(total)["witness"]) == 3


def nudged(weights: Weights) -> Weights:
    """Change one weight by one unit in its last place."""
    made = {n: t.clone() for n, t in weights.tensors.items()}
    flat = next(iter(made.values())).view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
    return Weights(made)


def test_a_slightly_other_download_still_opens_an_upload() -> None:
    # documented in docs/secure-aggregation.md: only noise or a fixed roster closes this
    server = ActiveServer(4, **QUIET)
    server.describe()
    assert open_by_two_rounds(server, OTHERS, nudged(server.weights)) <= 1e-5


class Padded(Weights):
    """Weights with an array beside them that no client reads."""

    def to_record(self) -> RecordDict:
        content = super().to_record()
        content["more"] = write_tensors({"a": torch.ones(1)})
        return content


def test_an_array_that_nobody_reads_makes_no_other_download() -> None:
    server = ActiveServer(4, **QUIET)
    server.describe()
    padded = Padded(server.weights.tensors)
    with pytest.raises(Refused, match='the arrays "more", which are no part of the'):
        open_by_two_rounds(server, OTHERS, padded)


def test_an_upload_without_influence_of_the_download_has_one_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # O-pFGL's statistics are the same whatever pseudo-graph comes with the request
    made = [0.1, 0.2]

    def download(strategy: Any, server_round: int, pid: int) -> GraphDownload:
        features = torch.full((2, strategy.federation.num_features), made[0])
        no_edge = torch.zeros(2, 2)
        return GraphDownload(PseudoGraph(features, torch.tensor([0, 1]), no_edge))

    monkeypatch.setattr("flower_fgl.strategies.opfgl.OPFGL.download", download)
    nodes = []
    for number, graph in enumerate(owner_graphs(4)):
        save_client_graph(path := tmp_path / f"{number}.npz", graph)
        nodes.append({"graph": str(path), "state-dir": str(tmp_path / "states")})
    settings: dict[str, Any] = {
        "method": "opfgl",
        "rounds": 1,
        "secure_aggregation": True,
    }
    assert run_owners(nodes, tmp_path / "a", **settings).status == "completed"
    made.reverse()
    with pytest.raises(Exception, match="answered an equal download under another"):
        run_owners(nodes[1:], tmp_path / "b", **settings)


def with_folders(folder: Path, **more: Any) -> dict[int, dict[str, Any]]:
    """Give each client a state-dir, and further keys of the node config."""
    return {p: {"state-dir": str(folder / str(p)), **more} for p in EVERYONE}


FIXED = {"fixed-roster": True, "secure-aggregation": True}


@pytest.mark.parametrize(
    ("roster", "match"),
    [
        (OTHERS, "the roster differs from that of the first sum"),
        (EVERYONE, "clients of the roster are missing in the sum"),
    ],
)
def test_with_a_fixed_roster_no_other_download_helps(
    tmp_path: Path, roster: list[int], match: str
) -> None:
    server = ActiveServer(4, node_configs=with_folders(tmp_path, **FIXED), **QUIET)
    server.describe()
    with pytest.raises(Refused, match=match):
        open_by_two_rounds(server, roster, nudged(server.weights))


def test_a_fixed_roster_holds_for_a_run_that_began_before_the_first_sum() -> None:
    history = SumHistory(is_fixed=True)
    history.check_roster("others")
    history.add(b"one", "all", "all")  # by another run
    with pytest.raises(PayloadError, match="the roster differs from that of the first"):
        history.check_sum(b"two", "others", "others")


@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_history_holds_in_all_runs_of_a_node(
    tmp_path: Path, is_fixed: bool
) -> None:
    configs = with_folders(tmp_path, **FIXED if is_fixed else {})
    first = ActiveServer(4, node_configs=configs, **QUIET)
    first.describe()
    summed(first, EVERYONE, EVERYONE, 1)
    second = ActiveServer(4, node_configs=configs, **QUIET)  # with empty states
    second.describe()
    with pytest.raises(Refused, match="roster"):
        summed(second, OTHERS, OTHERS, 1)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/sums-*.json")}
    assert modes == {0o600}


def test_a_damaged_history_is_no_empty_one(tmp_path: Path) -> None:
    server = ActiveServer(4, node_configs=with_folders(tmp_path), **QUIET)
    server.describe()
    summed(server, EVERYONE, EVERYONE, 1)
    (path,) = (tmp_path / "1").glob("sums-*.json")
    for text in ("", "[]", '{"a": 1}', '{"a": ["b"]}'):
        path.write_text(text)
        with pytest.raises(Refused, match=r"delete the file sums-\*\.json"):
            server.shares(1, EVERYONE, server_round=2)


def test_an_owner_is_known_by_its_identity_in_all_runs(tmp_path: Path) -> None:
    # the server gives the owners other numbers in another run
    keys = owners(tmp_path, 4)
    homes = with_folders(tmp_path)
    first = ActiveServer(4, node_configs={p: keys[p] | homes[p] for p in keys}, **QUIET)
    first.describe()
    summed(first, EVERYONE, EVERYONE, 1)
    order = {0: 0, 1: 2, 2: 1, 3: 3}
    again = {p: keys[q] | homes[p] for p, q in order.items()}
    second = ActiveServer(4, node_configs=again, **QUIET)
    second.describe()
    total = summed(second, EVERYONE, EVERYONE, 1)
    assert float(second.decode(total)["witness"]) == 4


# ---------------------------------------------------------------- what else may differ
def test_clients_with_different_downloads_reveal_nothing() -> None:
    # zero weights make the other clients' uploads predictable
    server = ActiveServer(4)
    server.describe()
    everyone = list(range(4))
    same = dict.fromkeys(everyone, everyone)
    dead = Weights({n: torch.zeros_like(t) for n, t in server.weights.tensors.items()})
    with pytest.raises(Refused, match=r"only the clients \[0\] have seen"):
        server.collect(same, same, same, weights=dict.fromkeys(everyone[1:], dead))


NOISE = {
    "upload_clip": 1.0,
    "upload_noise": 1.0,
    "upload_noise_model": "distributed",
}


@pytest.mark.parametrize(
    "others",
    [
        {"secure_fraction_bits": 20},
        {"upload_noise": 0.001},
        {"upload_clip": 100.0},
        {"upload_noise_model": "local"},
    ],
)
def test_clients_with_different_settings_reveal_nothing(others: dict[str, Any]) -> None:
    server = ActiveServer(4, {p: {**NOISE, **others} for p in (1, 2, 3)}, **NOISE)
    server.describe()
    everyone = list(range(4))
    same = dict.fromkeys(everyone, everyone)
    with pytest.raises(Refused, match=r"only the clients \[0\] have seen"):
        server.collect(same, same, same)


def test_equal_messages_to_all_open_the_sum_of_all() -> None:
    server = ActiveServer(4)
    server.describe()
    everyone = list(range(4))
    same = dict.fromkeys(everyone, everyone)
    vectors, revealed = server.collect(same, same, same)
    total = server.sum_of(vectors, revealed, everyone, 3)
    assert server.error(total, 0) > 1e-3  # the sum, and not an upload
    assert float(server.decode(total)["witness"]) == 4


# ------------------------------------------------------------------------------- keys
def test_a_roster_with_another_key_of_the_client_is_refused() -> None:
    server = ActiveServer(3)
    server.describe()
    with pytest.raises(Refused, match="another key of this client"):
        server.shares(0, range(3), {**server.keys, 0: b"\1" * 32})


def test_a_roster_with_one_key_twice_is_refused() -> None:
    server = ActiveServer(3)
    server.describe()
    with pytest.raises(Refused, match="two clients of the roster have the same key"):
        server.shares(0, range(3), {**server.keys, 2: server.keys[1]})


def test_changed_or_exchanged_shares_are_refused() -> None:
    server = ActiveServer(3)
    server.describe()
    rosters = {pid: [0, 1, 2] for pid in range(3)}
    server.offers = {pid: server.shares(pid, [0, 1, 2]) for pid in range(3)}
    offers = server.offers
    server.offers = {**offers, 1: offers[2], 2: offers[1]}
    with pytest.raises(Refused, match="shares of client 1 cannot be decrypted"):
        server.train(0, [0, 1, 2], rosters)


# -------------------------------------------- a server that invents all other clients
def open_by_invented_peers(
    server: ActiveServer, identities: dict[int, Identity] | None = None
) -> float:
    """Replace all clients except client 0 by clients of the server that send zeros."""
    config = parse_config({"secure-aggregation": True, "rounds": 2})
    everyone = list(range(server.count))
    own = {
        p: Member(p, config, {}, run_id=RUN, identity=(identities or {}).get(p))
        for p in everyone[1:]
    }
    keys = {0: server.keys[0], **{p: member.join() for p, member in own.items()}}
    current = SecureRound(keys, server_round=1, share=0.67)
    roster = current.roster()
    rows = {p: to_bytes(row) for p, row in enumerate(roster.keys)}
    current.add(0, server.shares(0, everyone, rows))
    for p, member in own.items():
        current.add(p, member.offer(1, roster))
    server.offers = current.offers
    download = download_digest(server.weights.to_record(), Weights.records)
    zeros = {name: torch.zeros(shape) for name, shape in server.summands.items()}
    peers = current.peers()
    vectors = {0: server.train(0, everyone, dict.fromkeys(everyone, everyone))}
    for p, member in own.items():
        masked = member.mask(1, peers[p], zeros, download=download)
        vectors[p] = masked.vector.numpy().view(np.uint64)
    survivors = current.survivors(everyone)
    tags = {p: member.check(1, survivors) for p, member in own.items()}
    tags[0] = Tags(torch.stack([*server.check(0, everyone).values()]))
    confirmed = current.confirmations(tags)
    codes = dict(enumerate(confirmed[0].tags))
    shares = server.unmask(0, everyone, codes)
    current.take(0, Reveal(from_bytes([shares[p] for p in everyone])))
    for p, member in own.items():
        current.take(p, member.reveal(1, confirmed[p]))
    sums = current.total(vectors, server.summands, fraction_bits=24)
    return server.error_of(sums, 0)


def fresh_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


def owners(folder: Path, count: int) -> dict[int, dict[str, str]]:
    """Create identities, pin them all, and return the node configs."""
    keys = {p: load_identity(folder / f"{p}.key") for p in range(count)}
    pinned = "".join(f'owner-{p} = "{key.text}"\n' for p, key in keys.items())
    (folder / "peers.toml").write_text(pinned)
    return {
        p: {
            "identity": str(folder / f"{p}.key"),
            "peers": str(folder / "peers.toml"),
        }
        for p in keys
    }


def test_without_pinned_keys_invented_clients_open_an_upload() -> None:
    # documented in docs/secure-aggregation.md: nobody can tell these clients from others
    server = ActiveServer(4)
    server.describe()
    assert open_by_invented_peers(server) <= OPENED


@pytest.mark.parametrize("is_signed", [False, True])
def test_with_pinned_keys_invented_clients_are_refused(
    tmp_path: Path, is_signed: bool
) -> None:
    server = ActiveServer(4, node_configs=owners(tmp_path, 4))
    server.describe()
    invented = {p: fresh_identity() for p in (1, 2, 3)} if is_signed else None
    with pytest.raises(Refused, match=r"client 1 has the identity .* does not list"):
        open_by_invented_peers(server, invented)


def test_owners_with_pinned_keys_sum_their_uploads(tmp_path: Path) -> None:
    server = ActiveServer(4, node_configs=owners(tmp_path, 4))
    server.describe()
    everyone = list(range(4))
    same = dict.fromkeys(everyone, everyone)
    vectors, revealed = server.collect(same, same, same)
    sums = server.decode(server.sum_of(vectors, revealed, everyone, 3))
    assert float(sums["witness"]) == 4


@pytest.mark.parametrize("how", ["other run", "other number", "other key", "twice"])
def test_signatures_hold_for_one_run_one_client_and_one_key(
    tmp_path: Path, how: str
) -> None:
    server = ActiveServer(4, node_configs=owners(tmp_path, 4))
    server.describe()
    peer = load_identity(tmp_path / "1.key")
    key = server.keys[1][:32]
    match = "key of client 1 is not signed by owner-1"
    if how == "other run":
        server.keys[1] = peer.card(key, run_id=RUN + 1, partition_id=1)
    elif how == "other number":
        server.keys[1] = peer.card(key, run_id=RUN, partition_id=2)
    elif how == "other key":
        server.keys[1] = bytes(31) + b"\1" + server.keys[1][32:]
    else:
        server.keys[2] = peer.card(server.keys[2][:32], run_id=RUN, partition_id=2)
        match = "clients 1 and 2 have the same identity, that of owner-1"
    with pytest.raises(Refused, match=match):
        server.shares(0, range(4))


def test_one_owner_that_pins_keys_leaves_a_run_with_unknown_clients(
    tmp_path: Path,
) -> None:
    nodes = owners(tmp_path, 4)
    server = ActiveServer(4, node_configs={0: nodes[0], 1: nodes[1]})
    server.describe()
    width = max(map(len, server.keys.values()))
    rows = {p: key.ljust(width, b"\0") for p, key in server.keys.items()}
    with pytest.raises(Refused, match="client 2 has the identity none"):
        server.shares(0, range(4), rows)
    server.shares(2, range(4), rows)  # which pins no keys itself
