"""Certificates and keys of a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.simulation.flower.certificates import make_certificates


def test_certificates_are_signed_by_their_ca_and_keys_are_private(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "keys"
    hosts = ["--host", "fl.example.org", "--host", "10.0.0.1", "--host", "localhost"]
    result = CliRunner().invoke(
        app, ["certificates", str(folder), "ash", "oak", *hosts]
    )
    assert result.exit_code == 0, result.output
    assert set(result.output.split()) == {str(path) for path in folder.iterdir()}
    ca, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("ca.crt", "server.pem")
    )
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    # the SuperLink's own programs connect to 127.0.0.1, whatever its public name is
    dns, addresses = (
        [str(name) for name in names.value.get_values_for_type(kind)]
        for kind in (x509.DNSName, x509.IPAddress)
    )
    assert dns == ["fl.example.org", "localhost"]
    assert addresses == ["10.0.0.1", "127.0.0.1"]
    form = Encoding.OpenSSH, PublicFormat.OpenSSH
    for owner in ("ash", "oak"):
        key = load_ssh_private_key((folder / f"{owner}.key").read_bytes(), None)
        public = (folder / f"{owner}.pub").read_bytes()
        assert key.public_key().public_bytes(*form) == public
    for private in ("ash.key", "oak.key", "server.key"):
        assert (folder / private).stat().st_mode & 0o777 == 0o600


def test_keys_in_use_are_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["ash"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunError, match=r"ca\.crt exists.*Choose another folder"):
        make_certificates(tmp_path, ["oak"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("owners", [["a/b"], [".."], [""], ["server"], ["ash", "ash"]])
def test_an_owner_whose_name_cannot_be_a_file_is_refused(
    owners: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="owner"):
        make_certificates(tmp_path / "keys", owners)
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write the certificates"):
        make_certificates(tmp_path / "file" / "keys", ["ash"])
