"""Upload of FED-PUB, and the proxy graph on which the server compares models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.protocols.fedavg import StackedPayload

__all__ = ["EmbeddedWeights", "proxy_graph"]

BLOCKS, BLOCK_SIZE, LINK_SHARE = 5, 100, 0.1
"""Proxy graph: number of blocks, nodes per block, edge probability within a block."""


@dataclass(frozen=True)
class EmbeddedWeights(StackedPayload):
    """Weights θ_i before masking, and mean proxy embedding o_i: 4·(P + p) bytes."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    records = ("weights", "embedding")
    entries = MappingProxyType({"embedding": "mean"})


def proxy_graph(seed: int, num_features: int) -> tuple[Tensor, Tensor]:
    """Draw the random proxy graph on which models are compared, Baek et al., Sec. 4.1.

    Returns standard normal features (500, d) and the undirected edges (2, 2E), each
    within one of the five blocks.
    """
    generator = torch_generator(seed, 0, SERVER, "proxy")
    pairs = torch.rand((BLOCKS, BLOCK_SIZE, BLOCK_SIZE), generator=generator)
    block, source, target = (pairs < LINK_SHARE).triu(diagonal=1).nonzero().unbind(1)
    edges = torch.stack([source, target]) + BLOCK_SIZE * block
    x = torch.randn((BLOCKS * BLOCK_SIZE, num_features), generator=generator)
    return x, torch.cat([edges, edges.flip(0)], dim=1)
