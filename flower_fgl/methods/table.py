"""The table of methods: the one place that knows them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, nearest
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.methods.clusteredsampling import ClusteredSamplingSettings
from flower_fgl.methods.f2l import F2LSettings
from flower_fgl.methods.fedala import FedALASettings
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.feded import FedEDSettings
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.methods.fedntd import FedNTDSettings
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.methods.fedpg import FedPGSettings
from flower_fgl.methods.fedproto import FedProtoSettings
from flower_fgl.methods.fedprox import FedProxSettings
from flower_fgl.methods.fedpub import FedPubSettings
from flower_fgl.methods.fedrep import FedRepSettings
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.methods.fedsem import FedSEMSettings
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.methods.fggp import FGGPSettings
from flower_fgl.methods.moon import MoonSettings
from flower_fgl.methods.opfgl import OPFGLSettings
from flower_fgl.methods.pfedfsl import PFedFSLSettings

if TYPE_CHECKING:
    from flower_fgl.client_apps.base import FglClientApp
    from flower_fgl.nn import Backbone
    from flower_fgl.strategies.base import FglStrategy

__all__ = ["METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """One method: two halves and what they are told.

    Parameters
    ----------
    paper : str
        Where it was published.
    strategy, client_app : str
        ``module:class`` of the server half and the client half. They are imported when
        asked for, so that a server never loads client code.
    network : str
        ``module:function`` that builds what a kept model's weights are of, if that is no
        backbone but follows from the method's settings and the sizes of one.
    settings : type or None
        Dataclass of the method's own settings.
    payload : str
        What travels per round and client, for people.
    defaults : mapping of str to bool, int, float or str
        General settings for which the method has its own default.
    has_global_model : bool
        Whether there is an aggregated model to score and to save.
    mixes_models : bool
        Whether clients may have different backbones.
    shares_embeddings : bool
        Whether the clients' embeddings meet, and so must be of one width.
    is_one_shot : bool
        Whether it is one upload and one download: ``rounds`` above 1 is an error.
    graphs : bool
        Whether it also classifies whole graphs (``setting = "graph"``).
    additive : bool
        Whether sums of the uploads are all it needs (``secure-aggregation = true``).
    takes_late_clients : bool
        Whether a client may join while the run is under way (``min-clients``): not where
        an exchange before round 1 gives every client what it needs.
    takes_batches : bool
        Whether ``batch-size`` and ``check-every`` say anything of its training.
    """

    paper: str
    strategy: str
    client_app: str
    network: str = ""
    settings: type | None = None
    payload: str = ""
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    has_global_model: bool = True
    mixes_models: bool = False
    shares_embeddings: bool = False
    is_one_shot: bool = False
    graphs: bool = True
    additive: bool = False
    takes_late_clients: bool = True
    takes_batches: bool = True

    def __post_init__(self) -> None:
        for f in () if self.settings is None else fields(self.settings):
            if "text" not in f.metadata:
                raise TypeError(
                    f"{self.settings}.{f.name} is no setting: declare it with "
                    "option(default, text)."
                )

        known = {kebab(f.name) for f in fields(GeneralSettings) if f.metadata["auto"]}
        if unknown := sorted(set(self.defaults) - known):
            raise ConfigError(
                f'A method\'s row has a default for "{unknown[0]}", which takes none. '
                f"{nearest(unknown[0], known)}"
            )

    def load_strategy(self) -> type[FglStrategy]:
        """Import the server half."""
        strategy: type[FglStrategy] = _load(self.strategy)
        return strategy

    def load_client_app(self) -> type[FglClientApp]:
        """Import the client half."""
        client_app: type[FglClientApp] = _load(self.client_app)
        return client_app

    def load_network(self) -> Callable[..., Backbone]:
        """Import what builds the method's own network."""
        build: Callable[..., Backbone] = _load(self.network)
        return build


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


METHODS: dict[str, Method] = {
    "adpfedgnn": Method(
        paper="Guan et al., IJCAI 2025",
        strategy="flower_fgl.strategies.adpfedgnn:ADPFedGNN",
        client_app="flower_fgl.client_apps.adpfedgnn:ADPFedGNNClientApp",
        network="flower_fgl.algorithms.adpfedgnn.network:build_network",
        settings=ADPFedGNNSettings,
        payload="4qP + P/8 + 4(P_mi + P_q) + 4 up, 4(P + P_mi + P_q) down",
        defaults={
            "model": "graphsage",
            "batch-size": 128,
            "weight-decay": 0.0,
            "eval-policy": "refresh",
            "absent-classes": "zero",
        },
        has_global_model=False,
        graphs=False,
    ),
    "clustered-sampling": Method(
        paper="Fraboni et al., ICML 2021",
        strategy="flower_fgl.strategies.clusteredsampling:ClusteredSampling",
        client_app="flower_fgl.client_apps.fedavg:FedAvgClientApp",
        settings=ClusteredSamplingSettings,
        payload="4P up, 4P down",
    ),
    "f2l": Method(
        paper="Wang et al., KDD 2023",
        strategy="flower_fgl.strategies.f2l:F2L",
        client_app="flower_fgl.client_apps.f2l:F2LClientApp",
        settings=F2LSettings,
        payload="4(P + 3p² + pC + C) up and down",
        defaults={"eval-policy": "refresh"},
        additive=True,
    ),
    "fed-pub": Method(
        paper="Baek et al., ICML 2023",
        strategy="flower_fgl.strategies.fedpub:FedPub",
        client_app="flower_fgl.client_apps.fedpub:FedPubClientApp",
        settings=FedPubSettings,
        payload="4(P+p) up, 4P down",
        defaults={"hidden-channels": 128},
        has_global_model=False,
    ),
    "fedala": Method(
        paper="Zhang et al., AAAI 2023",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.fedala:FedALAClientApp",
        settings=FedALASettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "fedavg": Method(
        paper="McMahan et al., AISTATS 2017",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.fedavg:FedAvgClientApp",
        settings=FedAvgSettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "feded": Method(
        paper="Guo et al., 2024",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.feded:FedEDClientApp",
        settings=FedEDSettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "fedlog": Method(
        paper="Kim et al., ICLR 2025",
        strategy="flower_fgl.strategies.fedlog:FedLog",
        client_app="flower_fgl.client_apps.fedlog:FedLogClientApp",
        network="flower_fgl.protocols.fedlog:build_network",
        settings=FedLogSettings,
        payload="4(P+Csd) up and down, once 4(C+P_pg) up, 4C·P_pg down; s nodes a class",
        defaults={
            "model": "graphsage",
            "local-epochs": 1,
            "batch-size": 64,
            "lr": 0.001,
            "optimizer-state": "reset",
            "weight-by": "equal",
        },
        has_global_model=False,
        graphs=False,
        takes_late_clients=False,
    ),
    "fedntd": Method(
        paper="Lee et al., NeurIPS 2022",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.fedntd:FedNTDClientApp",
        settings=FedNTDSettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "fedpano": Method(
        paper="Zhao et al., Sci China Inf Sci 68(1):112105, 2025",
        strategy="flower_fgl.strategies.fedpano:FedPANO",
        client_app="flower_fgl.client_apps.fedpano:FedPANOClientApp",
        settings=FedPANOSettings,
        payload="4(P_g+P_s+P_φ) up and down: network, generic classifier, generator",
        defaults={
            "model": "graphsage",
            "hidden-channels": 128,
            "dropout": 0.0,
            "rounds": 500,
            "local-epochs": 5,
            "optimizer": "sgd",
            "lr": 0.1,
            "weight-decay": 0.0,
            "participants": 5,
            "eval-policy": "refresh",
        },
        has_global_model=False,
        graphs=False,
        additive=True,
        takes_batches=False,
    ),
    "fedper": Method(
        paper="Arivazhagan et al., arXiv 1912.00818, 2019",
        strategy="flower_fgl.strategies.fedper:FedPer",
        client_app="flower_fgl.client_apps.fedper:FedPerClientApp",
        payload="4P_f up, 4P_f down, P_f parameters of the body",
        defaults={"eval-policy": "refresh"},
        has_global_model=False,
        additive=True,
    ),
    "fedpg": Method(
        paper="Wu et al., arXiv 2504.09493, 2025",
        strategy="flower_fgl.strategies.fedpg:FedPG",
        client_app="flower_fgl.client_apps.fedpg:FedPGClientApp",
        settings=FedPGSettings,
        payload="4M(p+1) up, 4Mp down, M prototypes present",
        defaults={"model": "gamlp"},
        has_global_model=False,
        mixes_models=True,
        shares_embeddings=True,
    ),
    "fedproto": Method(
        paper="Tan et al., AAAI 2022",
        strategy="flower_fgl.strategies.fedproto:FedProto",
        client_app="flower_fgl.client_apps.fedproto:FedProtoClientApp",
        settings=FedProtoSettings,
        payload="4M(p+1) up, 4Cp down, M of C classes present",
        has_global_model=False,
        mixes_models=True,
        shares_embeddings=True,
    ),
    "fedprox": Method(
        paper="Li et al., MLSys 2020",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.fedprox:FedProxClientApp",
        settings=FedProxSettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "fedrep": Method(
        paper="Collins et al., ICML 2021",
        strategy="flower_fgl.strategies.fedper:FedPer",
        client_app="flower_fgl.client_apps.fedrep:FedRepClientApp",
        settings=FedRepSettings,
        payload="4P_f up, 4P_f down, P_f parameters of the body",
        defaults={"local-epochs": 5, "eval-policy": "refresh"},
        has_global_model=False,
        additive=True,
    ),
    "fedsage+": Method(
        paper="Zhang et al., NeurIPS 2021",
        strategy="flower_fgl.strategies.fedsageplus:FedSagePlus",
        client_app="flower_fgl.client_apps.fedsageplus:FedSagePlusClientApp",
        settings=FedSagePlusSettings,
        payload="4P up, 4P down; before, T times 4Q(q+1)+4Mp+M up, 4Q(q+1)+q(4Mp+M) down",
        defaults={"model": "graphsage"},
        graphs=False,
        takes_late_clients=False,
    ),
    "fedsem": Method(
        paper="Long et al., World Wide Web 2023",
        strategy="flower_fgl.strategies.fedsem:FedSEM",
        client_app="flower_fgl.client_apps.fedavg:FedAvgClientApp",
        settings=FedSEMSettings,
        payload="4P up, 4P down",
        has_global_model=False,
    ),
    "fedtgp": Method(
        paper="Zhang et al., AAAI 2024",
        strategy="flower_fgl.strategies.fedtgp:FedTGP",
        client_app="flower_fgl.client_apps.fedproto:FedProtoClientApp",
        settings=FedTGPSettings,
        payload="4M(p+1) up, 4Cp down, M of C classes present",
        has_global_model=False,
        mixes_models=True,
        shares_embeddings=True,
    ),
    "fggp": Method(
        paper="Wan et al., AAAI 2024",
        strategy="flower_fgl.strategies.fggp:FGGP",
        client_app="flower_fgl.client_apps.fggp:FGGPClientApp",
        settings=FGGPSettings,
        payload="4(P + Mp) up, 4(P + Qp) down, M classes present, Q clusters",
        shares_embeddings=True,
        graphs=False,
    ),
    "local": Method(
        paper="no federation: every client alone",
        strategy="flower_fgl.strategies.local:Local",
        client_app="flower_fgl.client_apps.local:LocalClientApp",
        payload="0",
        has_global_model=False,
        mixes_models=True,
    ),
    "moon": Method(
        paper="Li et al., CVPR 2021",
        strategy="flower_fgl.strategies.fedavg:FedAvg",
        client_app="flower_fgl.client_apps.moon:MoonClientApp",
        settings=MoonSettings,
        payload="4P up, 4P down",
        additive=True,
    ),
    "opfgl": Method(
        paper="Yan et al., arXiv 2411.11304, 2024",
        strategy="flower_fgl.strategies.opfgl:OPFGL",
        client_app="flower_fgl.client_apps.opfgl:OPFGLClientApp",
        settings=OPFGLSettings,
        payload="8M(D+1) up, 4(sd+s+s²) down, once; M classes, D = (h+1)d, s nodes",
        defaults={
            "rounds": 1,
            "local-epochs": 3000,
            "check-every": 100,
            "patience": 10,
            "dropout": 0.0,
            "weight-decay": 0.0,
            "absent-classes": "zero",
        },
        has_global_model=False,
        mixes_models=True,
        is_one_shot=True,
        graphs=False,
        additive=True,
        takes_late_clients=False,
    ),
    "pfedfsl": Method(
        paper="Zhao et al., IEEE TNNLS 2024",
        strategy="flower_fgl.strategies.pfedfsl:PFedFSL",
        client_app="flower_fgl.client_apps.pfedfsl:PFedFSLClientApp",
        settings=PFedFSLSettings,
        payload="4(P + 1 + m) up, 4P(1 + m) down, m of q candidates",
        defaults={"eval-policy": "refresh"},
        has_global_model=False,
    ),
}
