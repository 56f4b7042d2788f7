"""Compare link prediction with a plain loop over PyG's layers, without federation.

    python benchmarks/plain_links.py --dataset pubmed --clients 10 --client 0

A GCN encoder of PyG and a dot product are trained on one client's graph, or on the whole
graph (``--clients 1``), with the library's split, and with and without weight decay. The
table shows the area under the ROC curve by epoch: it falls below that of the untrained
network before it rises. The last row is the library's own Local on the same client.

``--inside`` shows what happens in the loop instead, without weight decay: with and without
dropout, and with a trained number b added to the dot product. It prints the loss, the area
under the ROC curve of training and test pairs, the mean dot product of edges and of other
pairs, and the share of the embeddings' squared length that all nodes have in common.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from flower_fgl import simulate
from flower_fgl.core.metrics import auroc
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.nn.link import draw_negatives, pair_codes

WIDTH = 64
LR = 0.01
DROPOUT = 0.5


class Encoder(nn.Module):
    """Two layers of PyG's GCN."""

    def __init__(self, num_features: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = GCNConv(num_features, WIDTH)
        self.second = GCNConv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the embeddings of all nodes."""
        h = F.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        out: Tensor = self.second(h, edge_index)
        return out


def scores_of(model: Encoder, x: Tensor, graph: Graph) -> float:
    """Return the AUROC of the test edges in percent."""
    assert graph.pairs is not None
    model.eval()
    with torch.no_grad():
        z = model(x, graph.edge_index)
    model.train()
    score = (z[graph.pairs[0]] * z[graph.pairs[1]]).sum(dim=-1)
    logits = torch.stack([torch.zeros_like(score), score], dim=-1)
    return 100 * auroc(logits, graph.y, graph.masks["test"], 2)


def train_plain(graph: Graph, epochs: list[int], decay: float) -> list[float]:
    """Train on one graph; return the test AUROC at some epochs."""
    assert graph.pairs is not None
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    x = graph.x.to_dense() if graph.x.layout == torch.sparse_csr else graph.x
    edges = graph.pairs[:, graph.masks["train"]]
    known = pair_codes(edges, graph.num_nodes)
    model = Encoder(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=decay)
    found = []
    for epoch in range(max(epochs) + 1):
        if epoch in epochs:
            found.append(scores_of(model, x, graph))
        others = draw_negatives(known, graph.num_nodes, edges.shape[1], draw)
        z, pairs = model(x, graph.edge_index), torch.cat([edges, others], dim=1)
        score = (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)
        y = (torch.arange(len(score)) < edges.shape[1]).float()
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(score, y).backward()
        optimizer.step()
    return found


def show_inside(
    graph: Graph, epochs: list[int], dropout: float, has_bias: bool
) -> None:
    """Train on one graph, and print what happens."""
    assert graph.pairs is not None
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    x = graph.x.to_dense() if graph.x.layout == torch.sparse_csr else graph.x
    edges = graph.pairs[:, graph.masks["train"]]
    known, number = pair_codes(edges, graph.num_nodes), edges.shape[1]
    model = Encoder(x.shape[1], dropout)
    bias = nn.Parameter(torch.zeros(()), requires_grad=has_bias)
    optimizer = torch.optim.Adam([*model.parameters(), bias], lr=LR)
    y = (torch.arange(2 * number) < number).long()
    everything = torch.ones(2 * number, dtype=torch.bool)
    print(f"\ndropout {dropout:g}, {'trained b' if has_bias else 'no b'}")
    print("epoch", "loss", "train", "test", "edges", "others", "common", "b", sep="\t")
    for epoch in range(max(epochs) + 1):
        others = draw_negatives(known, graph.num_nodes, number, draw)
        pairs = torch.cat([edges, others], dim=1)
        if epoch in epochs:
            model.eval()
            with torch.no_grad():
                z = model(x, graph.edge_index)
                score = (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)
                loss = F.binary_cross_entropy_with_logits(score + bias, y.float())
            model.train()
            both = torch.stack([torch.zeros_like(score), score], dim=-1)
            common = z.mean(dim=0).square().sum() / z.square().sum(dim=1).mean()
            print(
                epoch,
                f"{loss:.3f}",
                f"{100 * auroc(both, y, everything, 2):.1f}",
                f"{scores_of(model, x, graph):.1f}",
                *(f"{score[y == kind].mean():.3f}" for kind in (1, 0)),
                f"{common:.2f}",
                f"{float(bias):.2f}",
                sep="\t",
            )
        z = model(x, graph.edge_index)
        score = (z[pairs[0]] * z[pairs[1]]).sum(dim=-1) + bias
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(score, y.float()).backward()
        optimizer.step()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--client", type=int, default=0)
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[0, 3, 15, 30, 75, 150]
    )
    parser.add_argument("--no-library", action="store_true", help="only the plain loop")
    parser.add_argument(
        "--inside", action="store_true", help="show losses and scores of the plain loop"
    )
    options = parser.parse_args()
    settings = {"dataset": options.dataset, "setting": "link"}
    config = parse_config(settings | {"clients": options.clients})
    graph = open_store(config, options.clients).load(options.client).graph
    if options.inside:
        for dropout, has_bias in ((DROPOUT, False), (0.0, False), (DROPOUT, True)):
            show_inside(graph, options.epochs, dropout, has_bias)
        return
    print("test AUROC after epochs", *options.epochs, sep="\t")
    for decay in (5e-4, 0.0):
        found = train_plain(graph, options.epochs, decay)
        print(f"PyG, decay {decay:g}", *(f"{v:.1f}" for v in found), sep="\t")
    if options.no_library:
        return
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            "local",
            options.dataset,
            clients=options.clients,
            setting="link",
            rounds=max(options.epochs) // 3,
            local_epochs=3,
            progress=False,
            output_dir=folder,
        )
    own = {
        3 * row["round"]: 100 * row["metrics"]["local"]["test"]["auroc"]
        for row in run.clients
        if row["partition_id"] == options.client and row.get("metrics")
    }
    shown = [f"{own[e]:.1f}" if e in own else "" for e in options.epochs]
    print("ours, Local", *shown, sep="\t")


if __name__ == "__main__":
    main()
