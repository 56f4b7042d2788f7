"""``Method``: the description of one method in the table ``METHODS``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, nearest
from flower_fgl.core.settings import GeneralSettings

__all__ = ["Method", "require_half"]


@dataclass(frozen=True)
class Method:
    """Describe one method: its paper, its server and client classes, and its settings.

    Settings are checked against these facts before the classes are imported, so a wrong
    setting is reported without loading torch. A contract test compares the facts with the
    classes.

    Parameters
    ----------
    name : str
        Value of the setting ``method``, e.g. ``"fed-pub"``.
    paper : str
        Authors, venue and year.
    strategy, client_app : str or type
        ``module:class`` of the server and of the client code. Only the process that runs
        a class imports it: a server never loads client code. In a notebook, the class
        itself (see :func:`flower_fgl.register`). By default FedAvg's.
    network : str
        ``module:function`` that builds the network of a saved model; empty if the network
        is one of the library's backbones.
    settings : type or None
        Dataclass of the method's own settings.
    payload : str
        Bytes per round and client, as formulas to display.
    sent_before : tuple of str
        What a client sends once before round 1, besides its description, in words for a
        data owner.
    defaults : mapping of str to bool, int, float or str
        The method's own defaults of general settings.
    unread : tuple of str
        General settings without effect on the method, which are refused if a user sets
        them.
    floors : mapping of str to (str, str)
        Floors of the node config that concern the method alone: with ``false`` a node
        refuses a run in which a setting of the method is not the only value allowed.
    uploads : bool
        Whether clients upload anything.
    has_global_model : bool
        Whether there is a global model to evaluate and save.
    mixes_models : bool
        Whether clients may have different backbones.
    shares_embeddings : bool
        Whether the embeddings of different clients are compared, so that all must have
        the same width.
    is_one_shot : bool
        Whether there is exactly one round (``rounds`` above 1 is an error).
    plans_rounds : bool
        Whether what it does in a round depends on the number of all rounds, so that a
        run cannot get more of them.
    graphs : bool
        Whether the method also classifies whole graphs (``setting = "graph"``).
    additive : bool
        Whether the server needs only the sum of the uploads (``secure-aggregation``).
    robust : bool
        Whether the server only averages uploads of weights, so that ``aggregation`` may
        replace the mean.
    sums_scaled_uploads : bool
        Whether that sum is the sum of the uploads times the clients' weights, so that
        clipped uploads bound it (``upload-noise-model = "distributed"``).
    keeps_first_layer : bool
        Whether the first layer of each client may stay local (``feature-align =
        "project"``).
    keeps_head : bool
        Whether the head of each client may stay local (``class-align = "local"``).
    predicts_links : bool
        Whether the method trains with ``setting = "link"`` and ``"edge"``: its loss takes
        pairs of nodes, and what it does with embeddings needs no classes of nodes.
    weighs_classes : bool
        Whether its loss is the cross-entropy of ``Client.train``, which weighs the classes
        by ``class-weights``.
    numbers : bool
        Whether it can predict numbers: its loss is :meth:`Client.task_loss`, and nothing
        reads classes.
    multi_label : bool
        Whether the method trains with ``target = "all"``: its loss is that of
        ``Client.task_loss``, and nothing else in it reads classes or probabilities.
    reads_messages : bool
        Whether the backbone may read edges with direction and features (``model =
        "gine"``, ``edge-direction``): both halves build the plain backbone, and none
        changes the edges of a graph.
    shares_parts : bool
        Whether clients may have different kinds of nodes and relations (``schema-align =
        "name"`` and ``"private"``), or vectors of their own nodes (``node-embedding``):
        each tensor is averaged over the clients that have it, and some stay local.
    takes_late_clients : bool
        Whether a client may join after round 1 (``min-clients``). False if messages
        before round 1 prepare every client.
    takes_batches : bool
        Whether training uses ``batch-size`` and ``check-every``.
    counts_steps : bool
        Whether it divides by the number of steps that led to a client's weights, so that
        ``check-every``, which keeps those of an earlier step, is refused.
    sends_last_steps : bool
        Whether it uploads what the last steps of training computed, which
        ``check-every`` may discard; it is then refused.
    samples_neighbors : bool
        Whether the steps of a batch are those of ``Client.train`` with the client's
        backbone alone, so that ``num-neighbors`` may limit what they read.
    stacks_checks : bool
        Whether the stacked form of its client half stops each client by ``check-every``.
    models : tuple of str
        Backbones that the method works with; empty: any.
    needs_cross_edges : bool
        Whether each client must know its edges to nodes of other clients.
    sends_mixtures : bool
        Whether the server mixes a model for each client, which ``evaluate = "mixed"``
        scores.
    """

    name: str
    paper: str
    strategy: str | type[Any] = "flower_fgl.strategies.fedavg:FedAvg"
    client_app: str | type[Any] = "flower_fgl.client_apps.fedavg:FedAvgClientApp"
    network: str = ""
    settings: type | None = None
    payload: str = ""
    sent_before: tuple[str, ...] = ()
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    floors: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    uploads: bool = True
    has_global_model: bool = True
    mixes_models: bool = False
    shares_embeddings: bool = False
    is_one_shot: bool = False
    plans_rounds: bool = False
    graphs: bool = True
    additive: bool = False
    robust: bool = False
    sums_scaled_uploads: bool = True
    keeps_first_layer: bool = False
    keeps_head: bool = False
    predicts_links: bool = False
    weighs_classes: bool = False
    numbers: bool = False
    multi_label: bool = False
    reads_messages: bool = False
    shares_parts: bool = False
    takes_late_clients: bool = True
    takes_batches: bool = True
    counts_steps: bool = False
    sends_last_steps: bool = False
    samples_neighbors: bool = False
    stacks_checks: bool = False
    models: tuple[str, ...] = ()
    needs_cross_edges: bool = False
    sends_mixtures: bool = False

    def __post_init__(self) -> None:
        for f in () if self.settings is None else fields(self.settings):
            if "text" not in f.metadata:
                raise TypeError(
                    f"{self.settings}.{f.name} is not a setting. Declare the field with "
                    "option(default, text)."
                )

        general = {kebab(f.name) for f in fields(GeneralSettings)}
        if unknown := sorted(set(self.unread) - general):
            raise ConfigError(f'"{unknown[0]}" is not a general setting.')
        known = {kebab(f.name) for f in fields(GeneralSettings) if f.metadata["auto"]}
        if unknown := sorted(set(self.defaults) - known):
            raise ConfigError(
                f'{self.name} has a default for "{unknown[0]}", but this is not a general '
                f"setting declared with auto=True. {nearest(unknown[0], known)}"
            )

    def load_strategy(self) -> type[Any]:
        """Import the server class, a subclass of ``FglStrategy``."""
        return _load(self.strategy)  # type: ignore[no-any-return]

    def load_client_app(self) -> type[Any]:
        """Import the client class, a subclass of ``FglClientApp``."""
        return _load(self.client_app)  # type: ignore[no-any-return]

    def load_network(self) -> Callable[..., Any]:
        """Import the function that builds the method's own network."""
        return _load(self.network)  # type: ignore[no-any-return]


def require_half(method: str, half: Any, base: type[Any]) -> None:
    """Reject a ``half`` of a method that is no subclass of this package's base class.

    ``half`` is what :meth:`Method.load_strategy` or :meth:`Method.load_client_app`
    returned, and ``base`` is ``FglStrategy`` or ``FglClientApp``. Raises a ConfigError
    for another class, e.g. a strategy of Flower.
    """
    if isinstance(half, type) and issubclass(half, base):
        return
    name = getattr(half, "__qualname__", repr(half))
    raise ConfigError(
        f'{getattr(half, "__module__", "")}.{name}, a half of the method "{method}", is no '
        f"subclass of {base.__module__}.{base.__qualname__}. Flower's own strategies and "
        f"apps do not know graphs: subclass {base.__name__} and override its hooks (see "
        "docs/adding-a-method.md)."
    )


def _load(reference: str | type[Any]) -> Any:
    """Import the object of a ``module:name`` reference; a class is returned as it is."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
