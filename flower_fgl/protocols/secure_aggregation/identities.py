"""Ed25519 identities of data owners, by which they recognise each other's keys.

An owner has one identity key for all runs. It signs the owner's key of each run. Owners
exchange their public identity keys outside of the federation, for example by telephone, and
pin them in a file. A server cannot then replace the key of a client by its own.
"""

import base64
import binascii
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from flower_fgl.core.atomic import replacing
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.protocols.secure_aggregation.keys import KEY_BYTES

__all__ = ["CARD_BYTES", "IDENTITY_BYTES", "Identity", "check_roster", "load_identity"]
__all__ += ["read_identity", "read_peers"]

IDENTITY_BYTES = 32
SIGNATURE_BYTES = 64
CARD_BYTES = KEY_BYTES + IDENTITY_BYTES + SIGNATURE_BYTES
"""Bytes of a signed key: the key of the run, the identity, and its signature."""


@dataclass(frozen=True)
class Identity:
    """Private identity key of a data owner, Ed25519 (RFC 8032)."""

    private: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    @property
    def text(self) -> str:
        """The public key as it stands in a file of peers, 44 characters of base64."""
        return base64.b64encode(self.public).decode()

    def card(self, key: bytes, *, run_id: int, partition_id: int) -> bytes:
        """Sign the key of a run (32 bytes); return key, identity and signature, 128 bytes.

        ``run_id`` is Flower's: a key of another run is refused.
        """
        signature = self.private.sign(_statement(key, run_id, partition_id))
        return key + self.public + signature


def check_roster(
    cards: Mapping[int, bytes], peers: Mapping[bytes, str], own: bytes, *, run_id: int
) -> None:
    """Raise a PayloadError unless different pinned identities have signed all keys.

    ``cards`` has the rows of :class:`.messages.Roster` by partition-id, ``peers`` the
    names of the owners by pinned identity; ``own`` is the receiver's own identity.
    """
    known = {**peers, own: "this client"}
    seen: dict[bytes, int] = {}
    for pid, card in cards.items():
        key, identity = card[:KEY_BYTES], card[KEY_BYTES : KEY_BYTES + IDENTITY_BYTES]
        if identity not in known:
            shown = base64.b64encode(identity).decode() if any(identity) else "none"
            raise PayloadError(
                f"client {pid} has the identity {shown}, which the file peers of this "
                "node does not list. Add its public key, or leave this run"
            )
        if identity in seen:
            raise PayloadError(
                f"clients {seen[identity]} and {pid} have the same identity, that of "
                f"{known[identity]}"
            )
        seen[identity] = pid
        statement = _statement(key, run_id, pid)
        try:
            Ed25519PublicKey.from_public_bytes(identity).verify(
                card[KEY_BYTES + IDENTITY_BYTES :], statement
            )
        except InvalidSignature as error:
            raise PayloadError(
                f"the key of client {pid} is not signed by {known[identity]} for this run"
            ) from error


def _statement(key: bytes, run_id: int, partition_id: int) -> bytes:
    """Return what an identity signs."""
    return f"flower-fgl/key/{run_id}/{partition_id}/".encode() + key


def load_identity(path: Path) -> Identity:
    """Read a private identity key, PKCS #8 in PEM; create it with mode 0600 if missing."""
    if not path.is_absolute():
        raise RunError(f"identity must be an absolute path, got {str(path)!r}.")
    try:
        if path.exists():
            return read_identity(path)
        private = Ed25519PrivateKey.generate()
        # whole or not at all: an empty file would block every later start
        with replacing(path, is_private=True, is_new=True) as file:
            file.write(
                private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            )
    except FileExistsError:  # another process has just created it
        return read_identity(path)
    except OSError as error:
        raise RunError(f"Cannot write the identity {path}: {error}.") from error
    return Identity(private)


def read_identity(path: Path) -> Identity:
    """Read a private identity key, with the errors of :func:`load_identity`."""
    try:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise RunError(
                f"Other users can read the identity {path}. Protect it: chmod 600 {path}"
            )
        private = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"Cannot read the identity {path}: {error}. It must be an unencrypted "
            "Ed25519 key in PEM format, as flower-fgl identity creates it."
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise RunError(
            f"The identity {path} must be an Ed25519 key, got {type(private).__name__}. "
            "Create one with flower-fgl identity."
        )
    return Identity(private)


def read_peers(path: Path) -> dict[bytes, str]:
    """Read a TOML file of lines ``name = "public key"``; return the names by key.

    A RunError says that the file or a key is malformed, or two owners have the same key.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"Cannot read the file of peers {path}: {error}.") from error
    peers: dict[bytes, str] = {}
    for name, text in entries.items():
        try:
            key = base64.b64decode(text, validate=True)
            Ed25519PublicKey.from_public_bytes(key)
        except (TypeError, ValueError, binascii.Error) as error:
            raise RunError(
                f"{path}: {name} must be a public key of flower-fgl identity, 44 "
                f"characters in quotes, got {str(text)[:60]!r}."
            ) from error
        if key in peers:
            raise RunError(f"{path}: {peers[key]} and {name} have the same key.")
        peers[key] = name
    if not peers:
        raise RunError(f'{path} lists no peer. Write one name = "public key" per line.')
    return peers
