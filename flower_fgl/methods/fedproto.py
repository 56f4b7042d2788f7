"""Settings of FedProto; its payloads are those of ``protocols/prototypes.py``.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["FedProtoSettings"]


@dataclass(frozen=True)
class FedProtoSettings:
    """Settings of FedProto."""

    proto_weight: float = option(
        1.0, "λ, weight of the distance to the prototypes; search 0.1, 1, 10", ge=0
    )
