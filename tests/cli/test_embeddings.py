from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.embeddings import draw_embeddings, principal_plane
from flower_fgl.cli.main import app
from flower_fgl.core.errors import RunError
from flower_fgl.lab import plots
from flower_fgl.runs.checkpoints import newest_checkpoint


def test_the_plane_holds_the_two_directions_that_vary_most(
    generator: torch.Generator,
) -> None:
    flat = torch.randn(50, 2, generator=generator) * torch.tensor([3.0, 1.0])
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator))
    points = flat @ turn[:2] + 7.0
    plane = principal_plane(points)
    apart = [(x[:, None] - x).norm(dim=-1) for x in (plane, flat)]
    torch.testing.assert_close(*apart, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plane.mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)
    assert plane[:, 0].std() > plane[:, 1].std()
    farthest = plane.gather(0, plane.abs().argmax(dim=0, keepdim=True))
    assert (farthest > 0).all()


def test_few_points_and_points_that_are_equal_have_a_plane_too() -> None:
    assert principal_plane(torch.ones(1, 5)).tolist() == [[0.0, 0.0]]
    assert torch.equal(principal_plane(torch.ones(3, 1)), torch.zeros(3, 2))
    line = principal_plane(torch.tensor([[0.0], [3.0]]))
    torch.testing.assert_close(line.abs(), torch.tensor([[1.5, 0.0], [1.5, 0.0]]))


def test_a_cloud_shows_every_node_and_names_its_classes() -> None:
    cloud = plots.Cloud(
        "client 4",
        {"test": np.zeros((3, 2)), "train": np.ones((2, 2))},
        {"test": np.array([2, 0, 2]), "train": np.array([0, 2])},
    )
    figure = plots.node_clouds([cloud] * 4, ["a", "b", "c"])
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title(loc="left") for panel in shown] == ["client 4"] * 4
    assert [len(dots.get_offsets()) for dots in shown[0].collections] == [3, 2]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["a", "c", "synthetic", "test", "train"]
    unnamed = plots.node_clouds([cloud]).legends[0].get_texts()
    assert [text.get_text() for text in unnamed][:2] == ["class 0", "class 2"]
    test, train = (dots.get_facecolor() for dots in shown[0].collections)
    assert np.array_equal(test[1][:3], train[0][:3])
    assert not np.array_equal(test[0][:3], test[1][:3])


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.thorough
def test_a_run_that_kept_its_checkpoint_can_be_drawn(
    small: dict[str, Any], tmp_path: Path
) -> None:
    run = simulate("fedpano", **{**small, "rounds": 3}, keep_checkpoint=True)
    checkpoint = newest_checkpoint(run.path)
    assert checkpoint is not None
    assert checkpoint.server_round == 3
    out = tmp_path / "nodes.png"
    words = [str(run.path), "--client", "0", "--client", "2", "--out", str(out)]
    done = CliRunner().invoke(app, ["embeddings", *words])
    assert done.exit_code == 0, done.output
    assert matplotlib.image.imread(out).std() > 0
    with pytest.raises(RunError, match=r"Clients must be in 0\.\.2, got \[3\]"):
        draw_embeddings(run.path, [1, 3], out)
    done = CliRunner().invoke(app, ["report", *words[:5], "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (
        "Node embeddings of individual clients"
        in (tmp_path / "report.html").read_text()
    )
    done = CliRunner().invoke(app, ["report", str(run.path), *words[:3]])
    assert "draws the nodes of a single run, got 2 runs" in str(done.exception)
    bare = draw_embeddings(run.path, [1], tmp_path / "nodes-1")
    assert bare.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match="Cannot write"):
        draw_embeddings(run.path, [1], tmp_path / "no" / "x.png")
    before = out.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda number: full_disk())
        with pytest.raises(RunError, match=r"Cannot write .*No space left"):
            draw_embeddings(run.path, [2], out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedpano", {}, "keep-checkpoint=true"),
        ("fedavg", {"keep_checkpoint": True}, "fedavg generates no synthetic nodes"),
        (
            "fedpano",
            {"keep_checkpoint": True, "fedpano": {"use_generator": False}},
            "fedpano generates no synthetic nodes",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    small: dict[str, Any],
    tmp_path: Path,
    method: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    run = simulate(method, **{**small, "rounds": 1}, **settings)
    with pytest.raises(RunError, match=message):
        draw_embeddings(run.path, [0], tmp_path / "x.png")


def test_a_client_that_takes_no_part_has_nothing_to_draw(tmp_path: Path) -> None:
    run = simulate(
        "fedpano",
        rounds=1,
        clients=4,
        setting="few-shot",
        hidden_channels=8,
        synthetic={"nodes": 280, "classes": 3, "block_skew": 0.5},
        keep_checkpoint=True,
        output_dir=str(tmp_path),
    )
    idle = {row["partition_id"] for row in run.clients if row.get("num_train") == 0}
    assert 0 < len(idle) < 4
    with pytest.raises(RunError, match="does not participate in this run"):
        draw_embeddings(run.path, sorted(idle)[:1], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_without_generator_noise_makes_the_nodes(
    small: dict[str, Any], tmp_path: Path
) -> None:
    run = simulate(
        "fedpano",
        **{**small, "rounds": 1},
        keep_checkpoint=True,
        fedpano={"augment": "gaussian"},
    )
    assert draw_embeddings(run.path, [0], tmp_path / "x.png").exists()
