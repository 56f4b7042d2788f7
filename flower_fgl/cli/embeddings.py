"""The ``embeddings`` command: draw clients' training, test and synthetic nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState, read_state
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.datasets.store import open_store
from flower_fgl.lab import plots
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.checkpoints import Checkpoint, newest_checkpoint
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder

__all__ = ["draw_embeddings", "embedding_figure", "principal_plane"]

MOST = 2000
"""Nodes of each kind that are drawn, the first ones of a client."""


def principal_plane(points: Tensor) -> Tensor:
    """Project points (n, p) onto their first two principal components, (n, 2).

    The result is centred; the largest absolute coordinate of each axis is positive.
    """
    centred = points - points.mean(dim=0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    plane = centred.new_zeros(len(points), 2)
    found = min(2, len(s))
    plane[:, :found] = u[:, :found] * s[:found]
    farthest = plane.abs().argmax(dim=0)
    return plane * plane.gather(0, farthest[None]).sign()


def draw_embeddings(folder: Path, partition_ids: Sequence[int], out: Path) -> Path:
    """Write the picture of :func:`embedding_figure`, as PNG if ``out`` has no suffix."""
    figure = embedding_figure(RunFolder.load(folder), partition_ids)
    plots.save_figure(figure, out, dpi=150)
    return out


def embedding_figure(run: RunFolder, partition_ids: Sequence[int]) -> Figure:
    """Draw embeddings by the clients' models in a checkpoint, a panel for each client."""
    folder = run.path
    config = parse_config(dict(flatten_config(run.config)))
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise RunError(
            f"{folder} has no checkpoint, which holds the clients' models. Run it with "
            "--set keep-checkpoint=true."
        )
    number = len(checkpoint.clients)
    if bad := [pid for pid in partition_ids if not 0 <= pid < number]:
        raise RunError(f"Clients must be in 0..{number - 1}, got {bad}.")
    app = METHODS[config.method].load_client_app()()
    clouds = []
    for pid in partition_ids:
        kinds = app.embed_kinds(
            _client(config, checkpoint, pid), checkpoint.snapshot.part("method").tensors
        )
        if kinds is None:
            raise RunError(
                f"{config.method} generates no synthetic nodes to draw. Use a run of "
                "FedPANO, which has a generator."
            )
        if not any(len(h) for h, _ in kinds.values()):
            raise RunError(
                f"Client {pid} does not participate in this run: it has no training and no "
                "test nodes to draw. Choose another client."
            )
        clouds.append(_cloud(f"client {pid}", kinds))
    return plots.node_clouds(clouds, run.summary.get("class_names"))


def _client(config: RunConfig, checkpoint: Checkpoint, partition_id: int) -> Client:
    number = len(checkpoint.clients)
    store = open_store(config, number)
    path = checkpoint.client_folder / f"{partition_id:06d}.safetensors"
    if not checkpoint.client_folder.is_dir():
        raise RunError(
            f"{checkpoint.folder} holds no client states. Set state-dir with Ray, or use "
            "--engine local."
        )
    device = torch.device("cpu")
    data = ClientData.build(store.load(partition_id), device)
    state = read_state(path) if path.exists() else ClientState()
    return Client(config, partition_id, number, data, state, device)


def _cloud(label: str, kinds: Mapping[str, tuple[Tensor, Tensor]]) -> plots.Cloud:
    """Project the nodes of a client onto a common plane."""
    parts = {kind: (h[:MOST], y[:MOST]) for kind, (h, y) in kinds.items()}
    plane = principal_plane(torch.cat([h for h, _ in parts.values()]))
    sizes = [len(h) for h, _ in parts.values()]
    places = dict(zip(parts, torch.split(plane, sizes), strict=True))
    return plots.Cloud(
        label,
        {kind: place.numpy() for kind, place in places.items()},
        {kind: y.numpy() for kind, (_, y) in parts.items()},
    )
