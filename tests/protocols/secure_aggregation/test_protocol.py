"""Clients and server of one round of secure aggregation, without messaging."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.secure_aggregation.client import Member
from flower_fgl.protocols.secure_aggregation.keys import mask_stream, threshold
from flower_fgl.protocols.secure_aggregation.messages import (
    Confirmations,
    MaskedUpload,
    Offer,
    Peers,
    Reveal,
    Roster,
    Survivors,
    Tags,
)
from flower_fgl.protocols.secure_aggregation.quantization import encode
from flower_fgl.protocols.secure_aggregation.server import SecureRound

SHAPES = {"a": (4, 5), "n": ()}
STEP = 2.0**-24
KEYS_OF_31_BYTES = torch.zeros(1, 31, dtype=torch.uint8)


@dataclass
class Table:
    """Clients and server at the start of a round."""

    members: dict[int, Member]
    server: SecureRound
    plain: dict[int, dict[str, torch.Tensor]]
    tags: dict[int, Tags] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.server.number

    def offers(self, *, lost: tuple[int, ...] = ()) -> None:
        for pid, member in self.members.items():
            offer = member.offer(self.number, self.server.roster())
            if pid not in lost:
                self.server.add(pid, offer)

    def uploads(self, *, lost: tuple[int, ...] = ()) -> dict[int, np.ndarray]:
        return {
            pid: self.members[pid]
            .mask(self.number, peers, self.plain[pid])
            .vector.numpy()
            for pid, peers in self.server.peers().items()
            if pid not in lost
        }

    def confirm(
        self, pids: Iterable[int], *, lost: tuple[int, ...] = ()
    ) -> dict[int, Confirmations]:
        survivors = self.server.survivors(pids)
        self.tags = {
            pid: self.members[pid].check(self.number, survivors)
            for pid in survivors.ids.tolist()
            if pid not in lost
        }
        return self.server.confirmations(self.tags)

    def close(
        self,
        uploads: dict[int, np.ndarray],
        *,
        lost: tuple[int, ...] = (),
        silent: tuple[int, ...] = (),
    ) -> dict[str, torch.Tensor]:
        for pid, confirmed in self.confirm(uploads, lost=silent).items():
            if pid not in lost:
                self.server.take(pid, self.members[pid].reveal(self.number, confirmed))
        vectors = {pid: vector.view(np.uint64) for pid, vector in uploads.items()}
        return self.server.total(vectors, SHAPES, fraction_bits=24)

    def check(self, sums: dict[str, torch.Tensor], pids: list[int]) -> None:
        for name in SHAPES:
            exact = sum(self.plain[pid][name].double() for pid in pids)
            off = (sums[name] - exact).abs().max()
            assert off <= len(pids) * STEP / 2 + 1e-12


def seat(count: int, generator: torch.Generator, entries: int = 20) -> Table:
    config = parse_config({"secure-aggregation": True})
    members = {pid: Member(pid, config, {}, run_id=9) for pid in range(0, 2 * count, 2)}
    keys = {pid: member.join() for pid, member in members.items()}
    plain = {
        pid: {
            "a": torch.randn(4, entries // 4, generator=generator),
            "n": torch.tensor(float(pid)),
        }
        for pid in members
    }
    return Table(members, SecureRound(keys, server_round=1, share=0.67), plain)


@pytest.fixture
def table(generator: torch.Generator) -> Table:
    """Seven clients (0, 2, …, 12) with threshold five."""
    return seat(7, generator)


def test_the_sum_is_the_plain_one_within_half_a_step_per_client(table: Table) -> None:
    table.offers()
    table.check(table.close(table.uploads()), list(table.members))


@pytest.mark.parametrize("lost", [(4,), (0, 10)])
def test_clients_lost_before_they_send_shares_are_left_out(
    table: Table, lost: tuple[int, ...]
) -> None:
    table.offers(lost=lost)
    left = [pid for pid in table.members if pid not in lost]
    table.check(table.close(table.uploads()), left)


@pytest.mark.parametrize("lost", [(4,), (0, 10)])
def test_clients_lost_before_they_send_a_masked_sum_are_left_out(
    table: Table, lost: tuple[int, ...]
) -> None:
    table.offers()
    left = [pid for pid in table.members if pid not in lost]
    table.check(table.close(table.uploads(lost=lost)), left)


@pytest.mark.parametrize("lost", [(4,), (0, 10)])
def test_clients_lost_before_they_confirm_stay_in_the_sum(
    table: Table, lost: tuple[int, ...]
) -> None:
    table.offers()
    table.check(table.close(table.uploads(), silent=lost), list(table.members))


@pytest.mark.parametrize("lost", [(4,), (0, 10)])
def test_clients_lost_before_they_reveal_stay_in_the_sum(
    table: Table, lost: tuple[int, ...]
) -> None:
    table.offers()
    table.check(table.close(table.uploads(), lost=lost), list(table.members))


def test_one_client_may_be_lost_in_each_of_two_exchanges(table: Table) -> None:
    table.offers(lost=(2,))
    sums = table.close(table.uploads(lost=(6,)))
    table.check(sums, [0, 4, 8, 10, 12])


def test_too_few_revealed_shares_open_nothing(table: Table) -> None:
    table.offers()
    with pytest.raises(PayloadError, match=r"4 clients sent a share.*5 of 7"):
        table.close(table.uploads(), lost=(0, 2, 4))


def test_a_tampered_share_is_named_and_the_sum_stands(table: Table) -> None:
    table.offers()
    uploads = table.uploads()
    for pid, confirmed in table.confirm(uploads).items():
        reveal = table.members[pid].reveal(1, confirmed)
        if pid == 4:
            reveal.shares[2, 20] ^= 1
            with pytest.raises(PayloadError, match="client 4 is not the one"):
                table.server.take(pid, reveal)
        else:
            table.server.take(pid, reveal)
    vectors = {pid: vector.view(np.uint64) for pid, vector in uploads.items()}
    sums = table.server.total(vectors, SHAPES, fraction_bits=24)
    table.check(sums, list(table.members))


def test_a_vector_that_is_not_masked_as_agreed_is_noticed(table: Table) -> None:
    table.offers()
    uploads = table.uploads()
    uploads[4] = np.roll(uploads[4], 1)
    with pytest.raises(PayloadError, match="masks did not cancel"):
        table.close(uploads)


@pytest.mark.parametrize(
    ("which", "lost", "match"), [(0, (), "its seed"), (1, (4,), "its key")]
)
def test_a_client_whose_shares_belong_to_no_secret_is_named(
    table: Table, which: int, lost: tuple[int, ...], match: str
) -> None:
    table.offers()
    offer = table.server.offers[4]
    other = table.server.offers[6]
    swapped = {0: {"seed_digest": other.seed_digest}, 1: {"mask_key": other.mask_key}}
    uploads = table.uploads(lost=lost)
    table.server.offers[4] = replace(offer, **swapped[which])
    with pytest.raises(PayloadError, match=f"client 4 do not reconstruct {match}"):
        table.close(uploads)


def test_a_client_whose_shares_were_changed_is_named_and_nothing_is_sent(
    table: Table,
) -> None:
    table.offers()
    table.server.offers[4].sealed[0] ^= 1  # those that client 4 encrypted to client 0
    peers = table.server.peers()
    with pytest.raises(PayloadError, match="shares of client 4 cannot be decrypted"):
        table.members[0].mask(1, peers[0], table.plain[0])
    uploads = table.uploads(lost=(0,))
    table.check(table.close(uploads), [2, 4, 6, 8, 10, 12])


def test_a_mask_key_that_is_none_is_refused_by_the_server(table: Table) -> None:
    offer = table.members[0].offer(1, table.server.roster())
    bad = replace(offer, mask_key=torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(PayloadError, match="no X25519 key"):
        table.server.add(0, bad)


# ------------------------------------------------------------- what the server sees
def test_no_upload_correlates_with_what_is_in_it(generator: torch.Generator) -> None:
    entries = 20_000
    table = seat(3, generator, entries)
    table.offers()
    for pid, vector in table.uploads().items():
        plain = encode(table.plain[pid], fraction_bits=24, summands=3).view(np.int64)
        numbers = vector[:entries].astype(np.float64)
        found = np.corrcoef(numbers, plain[:entries])[0, 1]
        assert abs(found) < 6 / np.sqrt(entries)  # six standard deviations


def test_every_byte_of_an_upload_is_uniform(generator: torch.Generator) -> None:
    table = seat(3, generator, 20_000)
    for values in table.plain.values():
        values["a"].zero_()  # constant data would be the easiest to recognise
    table.offers()
    for vector in table.uploads().values():
        octets = vector.view(np.uint8).reshape(-1, 8)
        for place in range(8):
            counts = np.bincount(octets[:, place], minlength=256)
            expected = len(octets) / 256
            chi2 = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi2 - 255) < 7 * np.sqrt(2 * 255)  # seven standard deviations


def test_equal_vectors_are_masked_differently_by_clients_and_rounds(
    generator: torch.Generator,
) -> None:
    table = seat(3, generator)
    for values in table.plain.values():
        values["a"].zero_()
        values["n"].zero_()
    table.offers()
    first = table.uploads()
    keys = {pid: member.join() for pid, member in table.members.items()}
    table.server = SecureRound(keys, server_round=2, share=0.67)
    table.offers()
    second = table.uploads()
    seen = [v.tobytes() for v in [*first.values(), *second.values()]]
    assert len(set(seen)) == 6
    assert not any(np.array_equal(first[p], second[p]) for p in first)


def test_without_the_own_masks_the_sum_stays_hidden(table: Table) -> None:
    table.offers()
    uploads = table.uploads()
    total = sum(vector.view(np.uint64) for vector in uploads.values())
    plain = sum(
        encode(table.plain[pid], fraction_bits=24, summands=7) for pid in uploads
    )
    assert not np.any(total[:-1] == plain)


def test_a_late_upload_cannot_be_opened(table: Table) -> None:
    # a server that claims client 4 dropped out gets its key, but also has its upload
    table.offers()
    seed = bytes(table.members[4].memory["seed"].numpy().tobytes())
    uploads = table.uploads()
    late = uploads.pop(4).view(np.uint64)
    table.close(uploads)
    pairwise = np.zeros_like(late)
    table.server._take_out(4, pairwise)  # what client 4 added for its peers
    plain = encode(table.plain[4], fraction_bits=24, summands=7)
    assert not np.any((late - pairwise)[:-1] == plain)
    own = mask_stream(
        seed, len(late)
    )  # only this mask is left, and no client revealed it
    assert np.array_equal((late - pairwise - own)[:-1], plain)


# --------------------------------------------------------------- what a client refuses
def test_a_second_request_to_unmask_is_refused(table: Table) -> None:
    table.offers()
    confirmed = table.confirm(table.uploads())
    table.members[0].reveal(1, confirmed[0])
    with pytest.raises(PayloadError, match="not at this step"):
        table.members[0].reveal(1, confirmed[0])
    with pytest.raises(PayloadError, match="not at this step"):
        table.members[0].check(1, table.server.survivors([0, 2, 4, 6, 8]))


def test_a_client_confirms_one_list_of_survivors(table: Table) -> None:
    table.offers()
    table.confirm(table.uploads())
    for pids in ([0, 2, 4, 6, 8], list(table.members)):
        with pytest.raises(PayloadError, match="already confirmed"):
            table.members[0].check(1, Survivors(torch.tensor(pids)))


def test_nothing_is_revealed_before_the_survivors_are_confirmed(table: Table) -> None:
    table.offers()
    confirmed = table.confirm(table.uploads(), lost=(0,))
    with pytest.raises(PayloadError, match="not confirmed"):
        table.members[0].reveal(1, confirmed[2])


@pytest.mark.parametrize("valid", [3, 4])
def test_enough_codes_must_be_right(table: Table, valid: int) -> None:
    table.offers()
    received = table.confirm(table.uploads())[0]
    received.tags[1 + valid :] ^= 1  # the first row is the client's own
    if valid == 4:
        table.members[0].reveal(1, received)
        return
    with pytest.raises(
        PayloadError, match=r"only the clients \[0, 2, 4, 6\] have seen"
    ):
        table.members[0].reveal(1, received)


def test_a_code_counts_for_its_sender_and_receiver_only(table: Table) -> None:
    table.offers()
    confirmed = table.confirm(table.uploads())
    own = table.tags[0].tags  # the codes that client 0 made
    swapped = Confirmations(confirmed[0].ids, confirmed[2].tags)
    reflected = Confirmations(confirmed[0].ids, own)
    for forged in (swapped, reflected):
        with pytest.raises(PayloadError, match=r"only the clients \[0\] have seen"):
            table.members[0].reveal(1, forged)


def test_only_one_of_both_secrets_of_a_client_is_revealed(table: Table) -> None:
    table.offers()
    uploads = table.uploads(lost=(4,))
    held = table.members[0].memory["held"]
    reveal = table.members[0].reveal(1, table.confirm(uploads)[0])
    lost = [pid == 4 for pid in table.members]
    for row, both, is_lost in zip(reveal.shares, held, lost, strict=True):
        assert torch.equal(row, both[33:] if is_lost else both[:33])


@pytest.mark.parametrize(
    ("pids", "match"),
    [
        ([0, 2, 4, 6], "at least 5"),
        ([2, 4, 6, 8, 10], "among them 0"),
        ([0, 2, 4, 6, 7], "at least 5"),
    ],
)
def test_a_list_of_survivors_that_cannot_be_is_refused(
    table: Table, pids: list[int], match: str
) -> None:
    table.offers()
    table.uploads()
    with pytest.raises(PayloadError, match=match):
        table.members[0].check(1, Survivors(torch.tensor(pids)))


def test_a_client_masks_once_a_round(table: Table) -> None:
    table.offers()
    peers = table.server.peers()
    table.members[0].mask(1, peers[0], table.plain[0])
    with pytest.raises(PayloadError, match="not at this step"):
        table.members[0].mask(1, peers[0], table.plain[0])
    with pytest.raises(PayloadError, match="already sent a masked vector in round 1"):
        table.members[0].offer(1, table.server.roster())


def test_a_client_masks_with_enough_peers_only(table: Table) -> None:
    table.offers(lost=(4, 6))
    peers = table.server.peers()[0]
    few = Peers(peers.ids[:3], peers.sealed[:3])
    with pytest.raises(PayloadError, match="at least 5 of the clients"):
        table.members[0].mask(1, few, table.plain[0])


def test_a_client_does_not_mask_what_it_did_not_prepare_for(table: Table) -> None:
    table.offers()
    peers = table.server.peers()[0]
    with pytest.raises(PayloadError, match=r"round 2.*not at this step"):
        table.members[0].mask(2, peers, table.plain[0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_refuses_to_be_summed_with_fewer_than_two_others(
    generator: torch.Generator, count: int
) -> None:
    table = seat(count, generator)
    with pytest.raises(PayloadError, match="at least 3"):
        table.offers()


def test_a_client_that_lost_its_key_says_so(table: Table) -> None:
    table.members[0].memory.clear()
    with pytest.raises(PayloadError, match="lost its key"):
        table.members[0].offer(1, table.server.roster())


def test_a_value_that_cannot_be_encoded_sends_nothing_and_spends_no_mask(
    table: Table,
) -> None:
    table.offers()
    peers = table.server.peers()[0]
    before = copy.deepcopy(table.members[0].memory)
    bad = {**table.plain[0], "n": torch.tensor(float("nan"))}
    with pytest.raises(PayloadError, match='"n" has non-finite'):
        table.members[0].mask(1, peers, bad)
    assert before.keys() == table.members[0].memory.keys()


def test_secrets_are_forgotten_as_soon_as_they_are_used(table: Table) -> None:
    table.offers()
    member = table.members[0]
    assert {"seed", "mask-secret"} <= set(member.memory)
    uploads = table.uploads()
    assert not {"seed", "mask-secret"} & set(member.memory)
    table.close(uploads)
    assert set(member.memory) == {"run-key", "card", "masked-round"}


def test_every_round_has_new_secrets(table: Table) -> None:
    first = table.members[0].offer(1, table.server.roster())
    second = table.members[0].offer(2, table.server.roster())
    assert not torch.equal(first.mask_key, second.mask_key)
    assert not torch.equal(first.seed_digest, second.seed_digest)


@pytest.mark.parametrize(
    ("clients", "share", "need"),
    [
        (3, 0.67, 3),
        (4, 0.51, 3),
        (5, 0.67, 4),
        (6, 0.67, 5),
        (9, 0.67, 7),
        (10, 0.51, 7),
        (10, 0.9, 9),
        (100, 0.67, 67),
        (1000, 0.67, 670),
    ],
)
def test_the_threshold_is_the_share_and_more_than_two_thirds(
    clients: int, share: float, need: int
) -> None:
    assert threshold(clients, share) == need
    assert 3 * need > 2 * clients


# ------------------------------------------------------------------------- payloads
def test_payloads_come_back_bit_for_bit_and_have_the_stated_size(table: Table) -> None:
    table.offers()
    n, entries = 7, 22  # 20 + 1 numbers and the check entry
    uploads = table.uploads()
    confirmed = table.confirm(uploads)[0]
    tags = table.tags[0]
    survivors = Survivors(torch.tensor(list(uploads)))
    reveal = table.members[0].reveal(1, confirmed)
    upload = MaskedUpload(torch.from_numpy(uploads[0]))
    cases = [
        (table.server.roster(), None, 40 * n),
        (table.server.offers[0], n, 48 + 158 * n),
        (table.server.peers()[0], None, 134 * n),
        (upload, entries, 8 * entries),
        (survivors, None, 8 * n),
        (tags, n, 16 * n),
        (confirmed, None, 24 * n),
        (reveal, n, 33 * n),
    ]
    for payload, spec, size in cases:
        record = payload.to_record()
        assert set(record) == set(payload.records)
        back = type(payload).from_record(record, spec and {"N": spec})
        assert all(torch.equal(vars(back)[k], v) for k, v in vars(payload).items())
        assert payload.num_bytes == size


@pytest.mark.parametrize(
    ("payload", "kind", "spec", "match"),
    [
        (MaskedUpload(torch.zeros(3, dtype=torch.int64)), MaskedUpload, 4, "shape"),
        (MaskedUpload(torch.zeros(4)), MaskedUpload, 4, "int64"),
        (Reveal(torch.zeros(2, 33, dtype=torch.uint8)), Reveal, 3, "shape"),
        (Survivors(torch.tensor([2, 1])), Survivors, None, "ascend"),
        (Survivors(torch.tensor([1, 1])), Survivors, None, "ascend"),
        (Survivors(torch.tensor([1])), Roster, None, "secure-roster"),
        (Tags(torch.zeros(2, 15, dtype=torch.uint8)), Tags, 2, "shape"),
        (Roster(torch.tensor([1]), KEYS_OF_31_BYTES), Roster, None, "shape"),
    ],
)  # fmt: skip
def test_malformed_payloads_are_refused(
    payload: Offer, kind: type[Offer], spec: int | None, match: str
) -> None:
    with pytest.raises(PayloadError, match=match):
        kind.from_record(payload.to_record(), spec and {"N": spec})


def test_a_payload_with_an_entry_too_many_is_refused() -> None:
    record = Survivors(torch.tensor([1, 2])).to_record()
    extra = MaskedUpload(torch.zeros(1, dtype=torch.int64)).to_record()
    record["secure-survivors"]["more"] = extra["secure-sum"]["vector"]  # type: ignore[index]
    with pytest.raises(PayloadError, match="exactly the entries"):
        Survivors.from_record(record)
