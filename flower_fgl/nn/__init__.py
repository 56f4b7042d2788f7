"""Backbone networks, each with an encoder and a classifier."""

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.decoupled import APPNP, GAMLP, SGC, SIGN, SSGC
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.message_passing import GAT, GCN, GCNII, GIN, GINE, MLP, GraphSAGE
from flower_fgl.nn.models import (
    MODELS,
    assign_models,
    backbone_shapes,
    build_model,
    num_parameters,
    state_shapes,
)
from flower_fgl.nn.sparse import EdgeOperator, Operator, SparseOperator
from flower_fgl.nn.topology import Topology, graph_filter

__all__ = ["APPNP", "GAMLP", "GAT", "GCN", "GCNII", "GIN", "GINE", "MLP", "MODELS"]
__all__ += ["SGC", "SIGN", "SSGC", "Backbone", "EdgeOperator", "GraphInput"]
__all__ += ["GraphSAGE", "Operator", "SparseOperator", "Topology", "assign_models"]
__all__ += ["backbone_shapes", "build_model", "graph_filter", "num_parameters"]
__all__ += ["state_shapes"]
