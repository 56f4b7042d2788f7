"""Worker processes of the local engine: N Ray actors, each with a part of the clients.

An exchange sends each of them one call, and gets one answer with all replies.
"""

import gc
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from flwr.app import Error, Message

from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import ClientState, MemoryStates
from flower_fgl.client_apps.stacked.grouping import num_stacks
from flower_fgl.core.errors import RunError
from flower_fgl.core.flower_internals import answer_message
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.parcels import Parcel
from flower_fgl.simulation.flower.superlink import short_folder
from flower_fgl.simulation.local_grid import LocalGrid, OneRunGrid, task_identity
from flower_fgl.simulation.register import adopt_registered, pack_registered
from flower_fgl.simulation.resources import REMEDY, require_cluster
from flower_fgl.strategies.rounds.messenger import dead_worker

__all__ = ["ClientHost", "Worker", "WorkerGrid", "WorkerStates", "host_of"]
__all__ += ["start_workers"]

PULL_SECONDS = 0.01
"""Seconds for which a pull waits for the next worker."""


class ClientHost:
    """The clients of one worker process.

    ``extensions`` are those of :func:`pack_registered` in the calling process.
    """

    def __init__(
        self,
        values: Mapping[str, Scalar],
        num_clients: int,
        run_id: int,
        extensions: bytes = b"",
    ) -> None:
        adopt_registered(extensions)
        gc.freeze()  # imported modules; LocalGrid adds the clients' graphs
        self._run_id = run_id
        self._states = MemoryStates()
        app = Dispatcher(Session(memory=self._states))
        self._grid = LocalGrid(app, num_clients, values, run_id=run_id, freezes=True)
        self._nodes = {pid: node for node, pid in self._grid.partitions.items()}

    def handle(self, parcel: Parcel) -> Parcel:
        """Let the clients handle their messages; return the replies in the same order."""
        with task_identity(self._run_id):
            messages = [
                Message(content, self._nodes[pid], kind, group_id=group)
                for content, (pid, kind, group, _, _) in zip(
                    parcel.contents(), parcel.letters, strict=True
                )
            ]
            replies = self._grid.send_and_receive(messages)
        return Parcel.pack(
            zip((pid for pid, *_ in parcel.letters), replies, strict=True)
        )

    def machine(self) -> str:
        """Return the address of the machine, as the Ray cluster knows it."""
        import ray

        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def states(self) -> dict[int, ClientState]:
        """Return the states of all clients, with tensors on the CPU."""
        states = self._states.of_run(self._run_id)
        return {pid: state.compact() for pid, state in states.items()}

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the states of all clients."""
        self._states.restore(self._run_id, states)


class Worker(NamedTuple):
    """A worker process: a Ray actor of :class:`ClientHost`, and its name for errors."""

    host: Any
    name: str

    def died(self, error: Exception) -> str:
        """Return the wording that the messenger recognises as the end of a worker."""
        return f"the actor died: {self.name}: {str(error).splitlines()[0]}"


class WorkerGrid(OneRunGrid):
    """Grid whose clients are spread over worker processes.

    ``workers`` have the clients of :func:`host_of`; ``partitions`` holds the
    partition-id of every node ID.
    """

    always_answers = True

    def __init__(
        self, workers: Sequence[Worker], partitions: Mapping[int, int], run_id: int
    ) -> None:
        super().__init__(run_id)
        self.workers = workers
        self._partitions = partitions
        self._calls: dict[Any, tuple[Worker, list[tuple[str, Message]]]] = {}
        self._ready: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the node IDs in arbitrary order."""
        return list(self._partitions)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send each worker the messages of its clients in one call."""
        batches: list[list[tuple[str, int, Message]]] = [[] for _ in self.workers]
        ids = []
        for message in messages:
            key = secrets.token_hex(8)
            partition_id = self._partitions[message.metadata.dst_node_id]
            place = host_of(partition_id, len(self._partitions), len(self.workers))
            batches[place].append((key, partition_id, message))
            ids.append(key)
        for worker, batch in zip(self.workers, batches, strict=True):
            if batch:
                parcel = Parcel.pack((pid, m) for _, pid, m in batch)
                sent = [(key, message) for key, _, message in batch]
                self._calls[worker.host.handle.remote(parcel)] = worker, sent
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived; wait a moment for the next worker."""
        import ray

        while self._calls:
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=PULL_SECONDS)
            if not done:
                break
            for call in done:
                self._receive(*self._calls.pop(call), call)
        return [self._ready.pop(key) for key in message_ids if key in self._ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push messages and wait for all replies."""
        import ray

        ids = self.push_messages(messages)
        ray.wait(list(self._calls), num_returns=len(self._calls), timeout=timeout)
        return self.pull_messages(ids)

    def _receive(
        self, worker: Worker, sent: list[tuple[str, Message]], call: Any
    ) -> None:
        """Store the replies of one call."""
        import ray

        try:
            parcel: Parcel = ray.get(call)
        except ray.exceptions.RayError as error:
            for key, message in sent:
                self._ready[key] = answer_message(
                    message, key, Error(0, worker.died(error))
                )
            return
        pairs = zip(sent, parcel.contents(), parcel.letters, strict=True)
        for (key, message), content, (*_, failure) in pairs:
            answer = content if failure is None else Error(*failure)
            self._ready[key] = answer_message(message, key, answer)


def host_of(partition_id: int, num_clients: int, num_hosts: int) -> int:
    """Return the worker of a client: one for each stack, if the stacks are enough."""
    stacks = num_stacks(num_clients)
    stack = partition_id % stacks if num_hosts <= stacks else partition_id
    return stack % num_hosts


class WorkerStates(MemoryStates):
    """The client states in the hosts of a :class:`WorkerGrid`, for checkpoints."""

    def __init__(self, workers: Sequence[Worker], num_clients: int) -> None:
        super().__init__()
        self._workers, self._num_clients = workers, num_clients

    def of_run(self, run_id: int) -> dict[int, ClientState]:
        """Return the states of all clients by partition-id."""
        found = self._answers([worker.host.states.remote() for worker in self._workers])
        return {pid: state for states in found for pid, state in states.items()}

    def restore(self, run_id: int, states: Mapping[int, ClientState]) -> None:
        """Replace the states of all clients."""
        parts: list[dict[int, ClientState]] = [{} for _ in self._workers]
        for partition_id, state in states.items():
            place = host_of(partition_id, self._num_clients, len(parts))
            parts[place][partition_id] = state.compact()
        pairs = zip(self._workers, parts, strict=True)
        self._answers([worker.host.restore.remote(part) for worker, part in pairs])

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for one answer of each worker; a RunError names one that died."""
        import ray

        found = []
        for worker, call in zip(self._workers, calls, strict=True):
            try:
                found.append(ray.get(call))
            except ray.exceptions.RayError as error:
                raise RunError(dead_worker(worker.died(error))) from error
        return found


@contextmanager
def start_workers(
    values: Mapping[str, Scalar],
    *,
    num_clients: int,
    run_id: int,
    workers: int,
    cpus: int = 1,
    gpus: float = 0.0,
) -> Iterator[list[Worker]]:
    """Start Ray actors of :class:`ClientHost` with ``cpus`` and ``gpus`` each; end them.

    Ray runs in this machine unless ``RAY_ADDRESS`` names a cluster; if the calling
    process has already initialised Ray, that is used and left running.
    """
    with _silent(), ExitStack() as stack:
        import ray

        if not ray.is_initialized():
            _start_ray(stack, workers * cpus)
        start: Any = ray.remote(ClientHost).options(num_cpus=cpus, num_gpus=gpus)
        extensions = pack_registered("workers = 1")
        hosts = []
        for _ in range(workers):
            hosts.append(start.remote(dict(values), num_clients, run_id, extensions))
            stack.callback(ray.kill, hosts[-1])
        try:
            machines = ray.get([host.machine.remote() for host in hosts])
        except ray.exceptions.RayError as error:
            raise RunError(f"A worker process did not start: {error}") from error
        yield [
            Worker(host, f"worker {k} of {workers} on {machine}")
            for k, (host, machine) in enumerate(
                zip(hosts, machines, strict=True), start=1
            )
        ]


def _start_ray(stack: ExitStack, num_cpus: int) -> None:
    """Start Ray in this machine, or join the cluster that ``RAY_ADDRESS`` names."""
    import ray

    address = os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        scratch = tempfile.TemporaryDirectory(  # Ray's sockets need a short path
            prefix="fgl-ray-", dir=short_folder(), ignore_cleanup_errors=True
        )
        options |= {"num_cpus": num_cpus, "include_dashboard": False}
        options["_temp_dir"] = stack.enter_context(scratch)
    require_cluster(os.environ)
    stack.callback(ray.shutdown)
    try:
        ray.init(address, **options)
    except Exception as error:  # of many types: other versions, no cluster, a lost one
        if address == "local":
            raise
        raise RunError(
            f'Ray cannot join the cluster of RAY_ADDRESS = "{address}": {error} {REMEDY}'
        ) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Hide Ray's notice on GPUs, its usage report, and GPUs from workers without one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # not in Ray 2.60
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Ray will no longer override")
        yield
