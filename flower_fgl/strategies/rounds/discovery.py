"""Wait for the clients of a run, request their descriptions, and check the federation."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.core.calibration import least_items
from flower_fgl.core.checks.rules import (
    describe_sampling,
    least_uploads,
    num_sampled,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError, first_of, refuse
from flower_fgl.core.settings import has_targets, listed_names
from flower_fgl.core.targets import CLASSES
from flower_fgl.protocols.base import DESCRIBE
from flower_fgl.protocols.describe import Description, Rejection
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.candidates import (
    Candidates,
    match_known_client,
    shared,
    short,
)
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import Failure

__all__ = ["Lost", "describe_nodes", "discover", "wait_for_clients"]
__all__ += ["wait_for_known_clients"]

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05
AGAIN_SECONDS = 1.0
"""Pause before a node that sent no answer is asked again."""
SETTLE_SECONDS = 10.0
"""With ``clients = 0``: a run that only unusable nodes joined fails after this time."""


@dataclass(frozen=True)
class Lost:
    """A node that sent no answer: switched off, restarted or cut off."""

    reason: str


Answers = dict[int, Description | Rejection | Lost]
Gathered = tuple[dict[int, Description], tuple[Rejection, ...], Collection[int]]


def describe_nodes(grid: Grid, nodes: list[int], config: RunConfig) -> Answers:
    """Request the descriptions of nodes, given and returned by Flower's node ids."""
    kind = f"{MessageType.QUERY}.{DESCRIBE}"
    # by place: messages keep the order of the grid, and a dead worker is named by it
    messages = {at: Message(RecordDict(), node, kind) for at, node in enumerate(nodes)}
    # the first message waits for worker processes to start and graphs to be loaded
    timeout = max(config.round_timeout, config.join_timeout)
    exchange = send_receive(
        grid, messages, timeout=timeout, max_mb=config.max_message_mb
    )
    out: Answers = {}
    for failure in exchange.failures:
        node, why = nodes[failure.partition_id], failure.reason
        out[node] = Lost(why) if failure.is_silent else Rejection(f"node {node}", why)
    for at, reply in exchange.replies.items():
        node = nodes[at]
        try:
            form = Rejection if Rejection.is_in(reply.content) else Description
            answer: Description | Rejection = form.from_record(reply.content)
            if answer.name in listed_names(config.without_owners):
                answer = Rejection(answer.name, "without-owners leaves it out")
            out[node] = answer
        except Exception as error:  # any failure concerns this reply only
            why = f"its description is malformed: {Failure.of(at, error).reason}"
            out[node] = Rejection(f"node {node}", why)
    return out


@dataclass
class _Survey:
    """The answers of all nodes that connected so far."""

    grid: Grid
    config: RunConfig
    answers: Answers = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def ask(self) -> Answers:
        """Request the descriptions of new nodes, and again of lost ones."""
        now = time.monotonic()
        pause = min(AGAIN_SECONDS, self.config.join_timeout / 5)
        due = [
            node
            for node in self.grid.get_node_ids()
            if node not in self.answers
            or (
                isinstance(self.answers[node], Lost)
                and now - self._asked[node] >= pause
            )
        ]
        if not due:
            return {}
        found = describe_nodes(self.grid, due, self.config)
        self._asked |= dict.fromkeys(found, time.monotonic())
        for node, answer in found.items():
            was_lost = isinstance(self.answers.get(node), Lost)
            if isinstance(answer, Lost) and not was_lost:
                log.warning(
                    "Node %s has not described itself (%s). It is asked again for "
                    "join-timeout = %g s.",
                    node,
                    answer.reason,
                    self.config.join_timeout,
                )
            elif was_lost and not isinstance(answer, Lost):
                log.info("Node %s answers again.", node)
            self.answers[node] = answer
        return found

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """Whether ``join-timeout`` is over."""
        return self.seconds > self.config.join_timeout

    @property
    def described(self) -> dict[int, Description]:
        """Descriptions by node id."""
        return {n: d for n, d in self.answers.items() if isinstance(d, Description)}

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Nodes that cannot take part."""
        return tuple(r for r in self.answers.values() if isinstance(r, Rejection))

    @property
    def lost(self) -> dict[int, str]:
        """Reasons of the nodes that sent no answer, by node id."""
        return {n: r.reason for n, r in self.answers.items() if isinstance(r, Lost)}

    def why_missing(self) -> str:
        """Name the nodes that sent no answer or an unusable one."""
        pairs = [(one.name, one.reason) for one in self.rejected]
        pairs += [(f"node {node}", reason) for node, reason in self.lost.items()]
        return _each_reason_once(pairs)


def wait_for_clients(grid: Grid, config: RunConfig) -> Gathered:
    """Wait until all expected clients are connected and have described themselves.

    A node that answers with an error or a malformed description is rejected, one that
    sends no answer is asked again. After ``join-timeout``, ``min-clients`` nodes suffice.
    Returns the descriptions by node id, at least one; the rejected nodes; and the ids of
    those that need not be asked again: with ``min-clients`` lost ones may join later.

    Notes
    -----
    1. Flower lists the former node id of a restarted SuperNode for a minute. So a lost
       node does not count as an expected one.
    """
    survey = _Survey(grid, config)
    while True:
        survey.ask()
        described, rejected = survey.described, survey.rejected
        answered = len(described) + len(rejected)
        expected = config.clients or _num_partitions(described)
        _check_number(len(described), expected, config)
        is_enough = len(described) >= config.min_clients
        if described and answered >= expected and is_enough:
            break
        if not described and _is_hopeless(survey):
            break
        if survey.is_over:
            if described and config.min_clients and is_enough:
                break
            raise RunError(_too_few(survey, expected))
        time.sleep(POLL_SECONDS)
    if not described:
        raise RunError(f"No client can take part. {survey.why_missing()}")
    lost = survey.lost.keys() if config.min_clients else set()
    return described, rejected, survey.answers.keys() - lost


def _is_hopeless(survey: _Survey) -> bool:
    """Return whether all nodes that can be expected answered, and none can take part."""
    if survey.lost or not survey.answers:
        return False
    if survey.config.clients:
        return len(survey.rejected) >= survey.config.clients
    return survey.seconds > min(SETTLE_SECONDS, survey.config.join_timeout)


def wait_for_known_clients(
    grid: Grid, config: RunConfig, before: Mapping[int, Description]
) -> Gathered:
    """Wait for the clients of an interrupted run, which keep their partition-ids.

    Returns as :func:`wait_for_clients`; nodes that are no clients of the run but could be
    may join later. A RunError names the missing clients.
    """
    survey = _Survey(grid, config)
    found: dict[int, tuple[int, Description]] = {}  # by partition-id
    changed: list[str] = []
    while len(found) < len(before):
        for node, answer in survey.ask().items():
            known = isinstance(answer, Description) and match_known_client(
                before, answer
            )
            if isinstance(known, tuple):
                found.setdefault(known[0], (node, known[1]))
            elif isinstance(known, str):
                changed.append(f" {known}")
        if len(found) < len(before) and survey.is_over:
            missing = [_label(one) for pid, one in before.items() if pid not in found]
            why = survey.why_missing()
            raise RunError(
                f"The run had {len(before)} clients, {len(found)} of them connected "
                f"within {config.join_timeout:g} s. Missing: {', '.join(missing)}. Start "
                "their SuperNodes with the same graphs as before, then resume the run."
                f"{''.join(changed)}{why and f' Failed: {why}'}"
            )
        time.sleep(POLL_SECONDS)
    clients = dict(found.values())
    others = survey.described.keys() - clients.keys()
    return clients, survey.rejected, survey.answers.keys() - others - survey.lost.keys()


def _each_reason_once(pairs: Collection[tuple[str, str]]) -> str:
    """Join (name, reason): a reason of many nodes comes once, with the first names."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{first_of(each)}: {reason}" for reason, each in names.items())


def _num_partitions(described: Mapping[int, Description]) -> int:
    """Return the number of partitions that most nodes report, 0 before the first report."""
    claims = Counter(d.num_partitions for d in described.values())
    number = max(claims, key=lambda n: (claims[n], n), default=0)
    if described and not number:
        raise RunError(
            "Data owners with their own graphs do not report how many clients there are. "
            "Set clients to the number of SuperNodes to wait for."
        )
    return number


def _check_number(described: int, expected: int, config: RunConfig) -> None:
    """Reject more nodes than clients, and fewer clients than ``min-clients``."""
    if described > expected > 0:
        raise RunError(
            f"{described} nodes are connected, but clients = {expected}. Set "
            f"clients to {described}, or to 0."
        )
    if config.min_clients > expected > 0:
        raise RunError(
            f"min-clients = {config.min_clients}, but the run has {expected} clients. "
            f"Set min-clients to at most {expected}."
        )


def _too_few(survey: _Survey, expected: int) -> str:
    """Describe how many clients are missing after ``join-timeout``."""
    config, described = survey.config, len(survey.described)
    of_all = f"{described} of {expected or 'any'} clients"
    why = survey.why_missing()
    if config.min_clients:
        return (
            f"Only {of_all} could take part within {config.join_timeout:g} s, but "
            f"min-clients = {config.min_clients}. {why}".rstrip()
        )
    if why:
        return (
            f"Only {of_all} described themselves within {config.join_timeout:g} s: {why}. "
            "Restart these SuperNodes, or set min-clients to start with fewer."
        )
    return (
        f"Only {of_all} connected within {config.join_timeout:g} s. In a simulation, set "
        'the number of supernodes (--federation-config "num-supernodes='
        f'{expected or 10}"). With clients = 0 the run takes all connected nodes.'
    )


def _label(client: Description) -> str:
    """Return a client's partition-id, and the name of a data owner."""
    name = f' ("{client.name}")' if client.name else ""
    return f"client {client.partition_id}{name}"


MOST_NAMES = 20
"""Class names that an error message lists."""


def discover(
    grid: Grid, config: RunConfig, before: Mapping[int, Description] | None = None
) -> Federation:
    """Wait for the clients, or for those of an interrupted run ``before``, and check them.

    A client that differs from most others in what all must share is left out with a
    warning: one client must not end the run.
    """
    if before:
        described, refused, queried = wait_for_known_clients(grid, config, before)
    else:
        found, rejected, queried = wait_for_clients(grid, config)
        candidates = Candidates(found, list(rejected), config)
        candidates.agree()
        described, refused = candidates.described, tuple(candidates.rejected)
    federation = Federation.of(
        described, refused=refused, turned_away=frozenset(queried) - described.keys()
    )
    for what, value in shared(config).items():
        groups: dict[object, list[int]] = {}
        for pid, description in federation.clients.items():
            groups.setdefault(value(description), []).append(pid)
        if len(groups) > 1:
            text = "; ".join(f"{short(v)} on clients {p}" for v, p in groups.items())
            raise RunError(f"The clients disagree on the {what}: {text}.")
    _reject_untrainable(federation, config)
    name, known = config.positive_class, federation.target.names
    if name and name not in known and not config.has_local_heads:
        raise RunError(
            f'positive-class = "{name}" is no class of the clients. Use one of: '
            f"{first_of(known, MOST_NAMES)}."
        )
    # all classes of a few-shot client have ``shots`` training nodes, so that a larger
    # min-class-count hides every class
    if config.setting == "few-shot" and config.min_class_count <= config.shots:
        _warn_of_disjoint_classes(federation)
    if config.min_clients:
        _warn_of_missing_clients(federation, config)
    return federation


def _report_single_class(federation: Federation) -> None:
    """Reject a run with a single class; warn if training items have only one."""
    clients = federation.clients.values()
    names = {name for client in clients for name in client.target.names}
    check = "Check the labels: a model that always predicts it looks perfect."
    if len(names) == 1:
        raise RunError(
            f'All labels are of one class, "{names.pop()}": nothing can be learned. '
            f"{check}"
        )
    counts: Counter[str] = Counter()
    for client in clients:
        counts.update(dict(zip(client.target.names, client.class_counts, strict=False)))
    held = +counts  # without zeros
    if len(held) == 1 and held.total() == sum(client.num_train for client in clients):
        name, number = held.most_common(1)[0]
        log.warning(
            'All %d training items are of the class "%s". %s', number, name, check
        )


def _reject_small_rounds(federation: Federation, config: RunConfig) -> None:
    """Raise an error if rounds sample fewer clients than they need."""
    able = len(federation.trainable)
    sampled, least = num_sampled(config, able), least_uploads(config)
    found = (
        f"{able} of {len(federation.clients)} clients can train, of which "
        f"{describe_sampling(config)} samples {sampled} per round, but "
    )
    rule = f'aggregation = "{config.aggregation}"'
    reasons = {
        f"{found}min-replies is {config.min_replies}. Lower min-replies, or sample more "
        "clients.": sampled < config.min_replies,
        f'{found}{rule} needs {least} uploads. Use aggregation = "mean", or sample more '
        "clients.": sampled < least,
    }
    refuse(reasons, RunError)


def _reject_untrainable(federation: Federation, config: RunConfig) -> None:
    """Raise an error if too few clients can train; warn of clients that cannot."""
    idle = [pid for pid in federation.clients if pid not in federation.trainable]
    is_few_shot = config.setting == "few-shot"
    if not federation.trainable:
        raise RunError(
            "No client has two classes with more than 25 nodes each. Use fewer clients."
            if is_few_shot
            else "No client has a training node. Check the split "
            "and the labels, or use fewer clients."
        )
    has_classes = config.predicts == CLASSES and not config.predicts_links
    if has_classes and not has_targets(config):
        _report_single_class(federation)
    if not config.min_clients:
        _reject_small_rounds(federation, config)
    if idle and is_few_shot:
        log.warning(
            "Clients %s do not take part: fewer than two of their classes have more than "
            "25 nodes.",
            idle,
        )
    elif idle:
        log.warning("Clients %s have no training nodes and are only evaluated.", idle)
    for client in federation.clients.values():
        if client.name and not client.is_owned:
            _warn_of_owner(client, config)
    if config.calibration != "none":
        _warn_of_few_items(federation, config)


def _warn_of_few_items(federation: Federation, config: RunConfig) -> None:
    """Warn of clients with fewer validation items than sets or intervals need."""
    least, clients = least_items(config.coverage), federation.clients.values()
    few = [client.shown for client in clients if client.num_val < least]
    if config.calibration == "shared":  # the items of all clients count together
        few = few if sum(client.num_val for client in clients) < least else []
    if few:
        log.warning(
            "coverage = %g needs %d validation items, which these do not have: %s. They "
            "get no sets or intervals.",
            config.coverage,
            least,
            first_of(few, MOST_NAMES),
        )


def _warn_of_owner(client: Description, config: RunConfig) -> None:
    """Warn of a natural owner that cannot train, select a model or be tested."""
    kind = "edges" if config.has_pairs else "nodes"
    for what, number in (
        ("training", client.num_train),
        ("validation", client.num_val),
        ("test", client.num_test),
    ):
        if not number:
            known = "" if config.predicts_links else "labelled "
            log.warning(
                "Owner %s: There are no %s.", client.name, f"{known}{what} {kind}"
            )
    held = [
        n for n, c in zip(client.target.names, client.class_counts, strict=False) if c
    ]
    if len(held) == 1 and not config.predicts_links:
        log.warning(
            "Owner %s: All labelled training %s have the class %s.",
            client.name,
            kind,
            held[0],
        )


def _warn_of_disjoint_classes(federation: Federation) -> None:
    """Warn if all clients report class counts and no class is trained by two clients."""
    counts = [d.class_counts for d in federation.clients.values()]
    trains = [sum(n > 0 for n in column) for column in zip(*counts, strict=True)]
    if all(counts) and len(federation.trainable) > 1 and max(trains) < 2:
        log.warning(
            "No class is trained by two clients: their label spaces do not overlap."
        )


def _warn_of_missing_clients(federation: Federation, config: RunConfig) -> None:
    """Log how many clients may join during the run."""
    capacity, found = federation.capacity(config), len(federation.clients)
    if found < capacity:
        log.warning(
            "The run starts with %d of %d clients (min-clients = %d). The %d missing "
            "clients may join between two rounds.",
            found,
            capacity,
            config.min_clients,
            capacity - found,
        )
