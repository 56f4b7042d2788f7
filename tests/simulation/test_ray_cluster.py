"""A stale ``RAY_ADDRESS`` is named before a run waits for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_fgl import simulate
from flower_fgl.core.errors import RunError
from flower_fgl.simulation import resources
from flower_fgl.simulation.flower.flower_simulation import launch
from flower_fgl.simulation.resources import require_cluster
from flower_fgl.simulation.run import run_one
from tests.support.flower_deployment import free_port
from tests.support.short_runs import SMALL


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "CONNECT_SECONDS", 0.5)


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Listen on a port; send every client an answer, or nothing."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve() -> None:
            clients = []
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    clients.append(listener.accept()[0])
                    if answer is not None:
                        clients[-1].sendall(answer)
            for client in clients:
                client.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


def refused(address: str, **more: str) -> str:
    with pytest.raises(RunError) as raised:
        require_cluster({"RAY_ADDRESS": address, **more})
    text = str(raised.value)
    assert f'RAY_ADDRESS = "{address}"' in text
    assert "RAY_ADDRESS=local" in text
    return text


def test_an_address_without_a_cluster_is_named_with_the_remedy(tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_port()}"
    assert "no Ray cluster answers" in refused(closed)
    assert "no Ray cluster answers" in refused(f"ray://{closed}")
    assert "is no address" in refused("head-node")
    assert "no Ray cluster answers" in refused("127.0.0.1:99999")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"{closed}\n")
    assert f"({closed})" in refused("auto", RAY_TMPDIR=str(tmp_path))


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x"])
def test_another_program_at_the_address_is_no_cluster(answer: bytes | None) -> None:
    with server(answer) as address:
        assert "no Ray cluster answers" in refused(address)


def test_a_server_that_speaks_grpc_is_accepted() -> None:
    with server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:
        require_cluster({"RAY_ADDRESS": address})
        require_cluster({"RAY_ADDRESS": f"ray://{address}"})
    with server(None) as address:  # with TLS the answer cannot be read
        require_cluster({"RAY_ADDRESS": address, "RAY_USE_TLS": "1"})


@pytest.mark.parametrize("address", ["", "local"])
def test_without_a_cluster_nothing_is_checked(address: str) -> None:
    require_cluster({"RAY_ADDRESS": address})
    require_cluster({})


def test_both_engines_name_a_stale_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    words = f'RAY_ADDRESS = "{address}"'
    with pytest.raises(RunError, match=words):
        launch(tmp_path, run_config={}, num_clients=2, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()
    settings = {**SMALL, "output_dir": str(tmp_path)}
    with pytest.raises(RunError, match=words):
        simulate("fedavg", clients=2, workers=2, **settings)
    values = {"method": "fedavg", "dataset": "synthetic", "clients": 2, "rounds": 1}
    with pytest.raises(RunError, match=words):
        run_one({**values, "output-dir": str(tmp_path)}, engine="auto")
