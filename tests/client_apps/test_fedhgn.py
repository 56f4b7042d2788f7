"""FedHGN: alignment against numbers by hand, and what leaves a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.client_apps.fedhgn import alignment
from flower_fgl.core.errors import RunError
from flower_fgl.strategies.fedhgn import FedHGN

SIZES: dict[str, Any] = {
    "dataset": "synthetic",
    "synthetic": {"nodes": 120, "features": 8},
    "clients": 3,
    "rounds": 3,
    "hidden_channels": 8,
}


def test_alignment_is_that_computed_by_hand() -> None:
    own = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]], requires_grad=True)
    others = torch.tensor([[[1.0, 1.0], [3.0, 0.0], [0.0, 1.5]]])
    found = alignment(own, others)
    assert found.item() == pytest.approx(1.25)
    found.backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.tensor([[[0.0, -2.0], [0.0, 1.0]]]))
    assert alignment(own, torch.zeros(1, 1, 2)).item() == pytest.approx(5.0)


def test_without_alignment_it_is_fedavg_with_private_schemas(tmp_path: Path) -> None:
    values = SIZES | {"output_dir": str(tmp_path), "model": "rgcn"}
    plain = simulate("fedavg", schema_align="private", **values)
    run = simulate("fedhgn", **values)

    def numbers(found: Any) -> list[Any]:
        return [(row["failures"], row["loss"], row["metrics"]) for row in found.rounds]

    assert len(numbers(run)) == 3
    assert numbers(run) == numbers(plain)


def test_others_coefficients_arrive_in_another_order_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, torch.Tensor]] = []
    download = FedHGN.download

    def watch(self: Any, server_round: int, pid: int) -> Any:
        found = download(self, server_round, pid)
        seen.append((server_round, pid, found.coefficients.rows))
        if server_round > 1:
            others = torch.cat([r for k, r in self.rows.items() if k != pid], dim=1)
            order = found.coefficients.rows[0, :, 0].argsort()
            expected = others[0, :, 0].argsort()
            torch.testing.assert_close(
                found.coefficients.rows[:, order], others[:, expected]
            )
        return found

    monkeypatch.setattr(FedHGN, "download", watch)
    values = SIZES | {"output_dir": str(tmp_path)}
    simulate("fedhgn", fedhgn={"alignment": "peers"}, **values)
    # 2 relations, both directions, of 2 other clients; none in the first round
    assert {rows.shape for number, _, rows in seen if number == 1} == {(2, 0, 8)}
    assert {rows.shape for number, _, rows in seen if number > 1} == {(2, 8, 8)}


def test_the_published_network_has_coefficients_from_its_second_layer(
    tmp_path: Path,
) -> None:
    values = SIZES | {"output_dir": str(tmp_path), "model": "rgcn-mean"}
    values |= {"node_embedding": True, "optimizer": "sgd", "lr": 0.1}
    runs = [
        simulate("fedhgn", fedhgn={"alignment": how}, **values)
        for how in ("none", "peers")
    ]
    sent = [sum(run.rounds[-1]["bytes"]["up"].values()) for run in runs]
    # 2 relations, both directions, of 3 clients, in one layer with 8 bases
    assert 4 * 3 * 4 * 8 <= sent[1] - sent[0] < 4 * 3 * 4 * 8 + 200
    assert runs[0].rounds[0]["loss"] == runs[1].rounds[0]["loss"]
    assert runs[0].rounds[-1]["loss"] != runs[1].rounds[-1]["loss"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"clients": 2, "fedhgn": {"alignment": "peers"}}, "at least 3 clients, got 2"),
        ({"schema_align": "same"}, 'set schema-align = "private"'),
        ({"num_bases": 0}, "num-bases above 0"),
    ],
)
def test_what_would_reveal_or_share_coefficients_is_refused(
    values: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=text):
        simulate("fedhgn", output_dir=str(tmp_path), **(SIZES | values))
