from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.fedlog import (
    FedLogDownload,
    FedLogShapes,
    FedLogUpload,
    PromptUpload,
    build_network,
)


def shapes_of(features: int, classes: int, **settings: Any) -> FedLogShapes:
    method_config = FedLogSettings(**settings)
    network = build_network(
        method_config,
        model="graphsage",
        num_features=features,
        num_outputs=classes,
        width=64,
        num_layers=2,
        dropout=0.5,
    )
    return FedLogShapes.of(network, method_config)


SHAPES = shapes_of(4, 2, nodes_per_class=3, encoder_channels=5)


def tensors(shapes: Any) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_coras_payloads_have_the_size_of_the_specification() -> None:
    shapes = shapes_of(1433, 7)
    up = FedLogUpload(tensors(shapes.weights), torch.zeros(140, 1433))
    assert up.num_bytes == 4 * (383_424 + 83_712 + 200_620)
    # 5.34 MB a round and client, both ways
    assert 2 * up.num_bytes == pytest.approx(5.34e6, rel=0.001)
    before = PromptUpload(torch.zeros(7), tensors(shapes.prompts))
    assert before.num_bytes == 4 * (7 + 1_233_817)
    down = FedLogDownload(up.weights, up.nodes, tensors(shapes.stacked))
    assert down.num_bytes == up.num_bytes + 4 * 7 * 1_233_817
    assert FedLogDownload(up.weights, up.nodes).num_bytes == up.num_bytes


def test_without_local_generalisation_only_weights_travel() -> None:
    shapes = shapes_of(4, 2, lg=False)
    assert shapes.nodes is None
    assert shapes.prompts is None
    weights = tensors(shapes.weights)
    up = FedLogUpload.from_record(FedLogUpload(weights, None).to_record(), shapes)
    assert up.num_bytes == 4 * sum(t.numel() for t in weights.values())
    assert up.nodes is None


def test_without_prompts_class_rates_travel_alone() -> None:
    shapes = shapes_of(4, 2, pg=False)
    sent = PromptUpload(torch.tensor([0.5, 0.5]), {})
    assert PromptUpload.from_record(sent.to_record(), shapes).num_bytes == 8


def test_a_download_may_hold_nothing_or_everything() -> None:
    nothing = FedLogDownload.from_record(FedLogDownload().to_record(), SHAPES)
    assert nothing.num_bytes == 0
    full = FedLogDownload(
        tensors(SHAPES.weights), torch.randn(6, 4), tensors(SHAPES.stacked)
    )
    read = FedLogDownload.from_record(full.to_record(), SHAPES)
    assert read.num_bytes == full.num_bytes
    assert torch.equal(read.nodes, full.nodes)
    assert all(torch.equal(read.prompts[n], full.prompts[n]) for n in full.prompts)


def test_uploads_that_do_not_fit_are_refused() -> None:
    weights, nodes = tensors(SHAPES.weights), torch.randn(6, 4)
    with pytest.raises(PayloadError, match="shape"):
        FedLogUpload.from_record(
            FedLogUpload(weights, torch.randn(6, 5)).to_record(), SHAPES
        )
    with pytest.raises(PayloadError, match="exactly the entries"):
        FedLogUpload.from_record(FedLogUpload(weights, None).to_record(), SHAPES)
    bad = dict(weights)
    bad["classifier.head.norm.weight"] = torch.full((64,), torch.nan)
    with pytest.raises(PayloadError, match="non-finite"):
        FedLogUpload.from_record(FedLogUpload(bad, nodes).to_record(), SHAPES)
    content = FedLogUpload(weights, nodes).to_record()
    content["nodes"] = write_tensors({"nodes": nodes, "extra": nodes})
    with pytest.raises(PayloadError, match="extra"):
        FedLogUpload.from_record(content, SHAPES)


def test_negative_class_rates_are_refused() -> None:
    sent = PromptUpload(torch.tensor([1.1, -0.1]), tensors(SHAPES.prompts))
    with pytest.raises(PayloadError, match="must not be negative"):
        PromptUpload.from_record(sent.to_record(), SHAPES)
