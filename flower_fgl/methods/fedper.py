"""Row of FedPer, see ``client_apps.fedper``."""

from dataclasses import replace

from flower_fgl.methods import fedavg

__all__ = ["METHOD"]

METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="fedper",
    paper="Arivazhagan et al., arXiv 1912.00818, 2019",
    strategy="flower_fgl.strategies.partly_shared:FedPer",
    client_app="flower_fgl.client_apps.fedper:FedPerClientApp",
    payload="4P_f up, 4P_f down, P_f parameters of the body",
    defaults={"eval-policy": "refresh"},
    has_global_model=False,
    settings=None,
)
