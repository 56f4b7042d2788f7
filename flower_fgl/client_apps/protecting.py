"""What a client does to an upload before it is packed, whatever its method."""

from __future__ import annotations

from flower_fgl.client_apps.client import Client
from flower_fgl.protocols.base import Payload

__all__ = ["protect"]


def protect(client: Client, upload: Payload) -> Payload:
    """Leave classes of too few nodes out of an upload.

    Parameters
    ----------
    client : Client
        Its settings say ``min-class-count``.
    upload : Payload
        What the method wants to upload.

    Returns
    -------
    Payload
        What may leave the client.
    """
    least = client.config.min_class_count
    if least > 1:
        shared = client.data.graph.class_counts("train") >= least
        upload = upload.withhold(shared, least)
    return upload
