"""Certificates of a SuperLink and keys of SuperNodes, for a rehearsal with TLS.

Use these files for a rehearsal only. In a real federation the certificates are signed by
its own CA, and each data owner creates its key and sends only the ``.pub`` file.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flower_fgl.core.errors import ConfigError, RunError

__all__ = ["make_certificates"]

VALID = datetime.timedelta(days=365)
HOSTS = ("localhost", "127.0.0.1")
"""In every certificate: the SuperLink's own SuperExec connects to 127.0.0.1."""
OURS = ("ca.crt", "server.pem", "server.key")


def make_certificates(
    folder: Path, owners: Sequence[str], hosts: Sequence[str] = ()
) -> list[Path]:
    """Write ``ca.crt``, ``server.pem``, ``server.key`` and a key pair per owner.

    Private keys get mode 0600; the owners' are ``<owner>.key`` and ``<owner>.pub``.
    ``hosts`` are names and addresses by which SuperNodes reach the SuperLink, besides
    ``localhost`` and ``127.0.0.1``. Returns the files.
    """
    for owner in owners:
        if owner != Path(owner).name or owner in ("", ".", "..", "server"):
            raise ConfigError(
                f'"{owner}" cannot be the name of an owner: it names the files '
                "<owner>.key and <owner>.pub. Use letters, digits and hyphens."
            )
    if len(set(owners)) < len(owners):
        raise ConfigError(f"Each owner must be named once, got {', '.join(owners)}.")
    files = [folder / name for name in OURS]
    files += [folder / f"{owner}{end}" for owner in owners for end in (".key", ".pub")]
    if existing := [str(path) for path in files if path.exists()]:
        raise RunError(
            f"{existing[0]} exists and may be in use. Choose another folder, or remove it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, owners, list(dict.fromkeys([*hosts, *HOSTS])))
    except OSError as error:
        raise RunError(
            f"Cannot write the certificates to {folder}: {error.strerror}."
        ) from error
    return files


def _write(folder: Path, owners: Sequence[str], hosts: Sequence[str]) -> None:
    """Create all keys and certificates."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name("federation-ca")
    authority = x509.BasicConstraints(ca=True, path_length=0)
    ca = _certificate(ca_name, ca_name, ca_key, ca_key, authority)
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    server = _certificate(_name(hosts[0]), ca_name, server_key, ca_key, names)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    _write_key(folder / "server.key", server_key, serialization.PrivateFormat.PKCS8)
    for owner in owners:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_key(folder / f"{owner}.key", key, serialization.PrivateFormat.OpenSSH)
        ssh = serialization.Encoding.OpenSSH
        public = key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH)
        (folder / f"{owner}.pub").write_bytes(public)


def _name(text: str) -> x509.Name:
    """Return the name of a certificate's holder."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    """Return a host name or an IP address for a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    """Sign a certificate that is valid for a year."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=5),
        not_valid_after=now + VALID,
    )
    is_authority = isinstance(extension, x509.BasicConstraints)
    builder = builder.add_extension(extension, critical=is_authority)
    return builder.sign(signer, hashes.SHA256())


def _write_key(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    """Write a private key that only the user of this process may read."""
    data = key.private_bytes(
        serialization.Encoding.PEM, form, serialization.NoEncryption()
    )
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(data)
