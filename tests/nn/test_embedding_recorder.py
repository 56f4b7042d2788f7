from __future__ import annotations

import torch

from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn.backbone import RecordingBackbone


def recording(*, readout: bool) -> RecordingBackbone:
    sizes = {"in_channels": 3, "hidden_channels": 8, "num_outputs": 2, "num_layers": 2}
    torch.manual_seed(0)
    return RecordingBackbone(build_model("gin", **sizes, dropout=0.5, readout=readout))


def three_graphs() -> GraphInput:
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    batch = torch.tensor([0, 0, 1, 1, 2])
    return GraphInput(torch.rand(5, 3), edges, batch=batch)


def test_items_are_the_graphs_of_the_last_embedding() -> None:
    model, graphs = recording(readout=True), three_graphs()
    model(graphs)
    assert model.items is None
    assert model.embedding.shape == (3, 8)
    model(graphs.select(torch.tensor([2, 0])))
    assert model.items is not None
    assert model.items.tolist() == [2, 0]
    assert model.embedding.shape == (2, 8)
    model(graphs)
    assert model.items is None


def test_at_rest_embeds_without_dropout_and_gradient() -> None:
    model = recording(readout=False)
    graph = GraphInput(torch.rand(4, 3), torch.tensor([[0, 1], [1, 0]]))
    model.train()
    first, second = model.at_rest(graph), model.at_rest(graph)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not model.training
    model.train()
    assert not torch.equal(model.embed(graph), first)
