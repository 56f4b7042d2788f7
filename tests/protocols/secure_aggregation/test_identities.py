"""Files of identities and pinned peers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.client_apps.runtime.secure_aggregation import check_identity
from flower_fgl.core.errors import RunError
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.protocols.secure_aggregation.identities import (
    CARD_BYTES,
    load_identity,
    read_peers,
)


def test_an_identity_is_created_once_and_only_its_owner_can_read_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "identity.key"
    first = load_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_identity(path).public == first.public
    assert len(first.card(bytes(32), run_id=1, partition_id=0)) == CARD_BYTES


def test_a_full_disk_leaves_no_empty_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity.key"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space left"):
            load_identity(path)
    assert not list(tmp_path.iterdir())
    assert load_identity(path).public == load_identity(path).public


def test_an_identity_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    load_identity(path)
    path.chmod(0o640)
    with pytest.raises(RunError, match="chmod 600"):
        load_identity(path)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff\0"])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(RunError, match="Cannot read the identity"):
        load_identity(path)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    key = X25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    path.chmod(0o600)
    with pytest.raises(RunError, match="must be an Ed25519 key, got X25519"):
        load_identity(path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Cannot write the identity .*missing"):
        load_identity(tmp_path / "missing" / "identity.key")


def test_the_command_prints_what_stands_in_a_file_of_peers(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    texts = []
    for _ in range(2):
        result = CliRunner().invoke(app, ["identity", str(path)])
        assert result.exit_code == 0, result.output
        texts.append(result.output.strip())
    assert texts[0] == texts[1] == load_identity(path).text
    peers = tmp_path / "peers.toml"
    peers.write_text(f'hospital-a = "{texts[0]}"\n')
    assert read_peers(peers) == {load_identity(path).public: "hospital-a"}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "lists no peer"),
        ("a = 1\n", "a must be a public key"),
        ('a = "c2hvcnQ="\n', "a must be a public key"),
        ('a = "not base64!"\n', "a must be a public key"),
        ("a = \n", "Cannot read the file of peers"),
        (f'a = "{"A" * 43}="\nb = "{"A" * 43}="\n', "a and b have the same key"),
    ],
)
def test_a_malformed_file_of_peers_is_refused(
    tmp_path: Path, content: str, match: str
) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(content)
    with pytest.raises(RunError, match=match):
        read_peers(path)


def test_a_node_config_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    identity = str(tmp_path / "identity.key")
    peers = str(tmp_path / "peers.toml")
    with pytest.raises(RunError, match="peers but no identity"):
        check_identity({"peers": peers})
    with pytest.raises(RunError, match="Cannot read the file of peers"):
        check_identity({"peers": peers, "identity": identity})
    with pytest.raises(RunError, match="peers must be an absolute path"):
        parse_node_config({"peers": "peers.toml", "identity": identity})
    with pytest.raises(RunError, match="identity must be an absolute path"):
        check_identity({"identity": "identity.key"})
    check_identity({})
    check_identity({"identity": f"{identity}-2"}, creates=False)
    assert not Path(f"{identity}-2").exists()
