"""Row of FedPer.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.
"""

from __future__ import annotations

from flower_fgl.methods.method import Method

__all__ = ["METHOD"]

METHOD = Method(
    name="fedper",
    paper="Arivazhagan et al., arXiv 1912.00818, 2019",
    strategy="flower_fgl.strategies.fedper:FedPer",
    client_app="flower_fgl.client_apps.fedper:FedPerClientApp",
    payload="4P_f up, 4P_f down, P_f parameters of the body",
    defaults={"eval-policy": "refresh"},
    has_global_model=False,
    additive=True,
    robust=True,
    keeps_first_layer=True,
    keeps_head=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    samples_neighbors=True,
)
