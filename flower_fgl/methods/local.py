"""Row of local training: each client trains alone, nothing is exchanged."""

from flower_fgl.methods.method import Method

__all__ = ["METHOD"]

METHOD = Method(
    name="local",
    paper="no federation: every client alone",
    strategy="flower_fgl.strategies.local:Local",
    client_app="flower_fgl.client_apps.local:LocalClientApp",
    payload="0",
    uploads=False,
    has_global_model=False,
    mixes_models=True,
    keeps_first_layer=True,
    keeps_head=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    shares_parts=True,
    samples_neighbors=True,
    unread=("weight-by",),
)
