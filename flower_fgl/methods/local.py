"""Row of local training: each client trains alone, nothing is exchanged."""

from dataclasses import replace

from flower_fgl.methods import fedavg

__all__ = ["METHOD"]

METHOD = replace(
    fedavg.METHOD,
    name="local",
    paper="no federation: every client alone",
    strategy="flower_fgl.strategies.local:Local",
    client_app="flower_fgl.client_apps.local:LocalClientApp",
    settings=None,
    payload="0",
    uploads=False,
    has_global_model=False,
    mixes_models=True,
    additive=False,
    robust=False,
    unread=("weight-by",),
)
