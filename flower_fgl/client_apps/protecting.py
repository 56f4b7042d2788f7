"""What a client does to an upload before it is packed, whatever its method."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from flower_fgl.client_apps.client import Client
from flower_fgl.errors import PayloadError
from flower_fgl.privacy import clip_and_blur, numbers_of, with_numbers
from flower_fgl.protocols.base import Payload

__all__ = ["protect"]


def protect(client: Client, upload: Payload, download: Any = None) -> Payload:
    """Withhold, clip and blur what the settings say.

    Parameters
    ----------
    client : Client
        Its settings say ``min-class-count``, ``upload-clip`` and ``upload-noise``.
    upload : Payload
        What the method wants to upload.
    download : Payload, optional
        What it made the upload from. Of the upload's kind and shapes, it is known to the
        server, and only the difference to it is clipped.

    Returns
    -------
    Payload
        What may leave the client.

    Raises
    ------
    PayloadError
        If a number is not finite.

    Notes
    -----
    1. Noise that anybody can draw again hides nothing, so its seed comes from the
       operating system and not from ``seed``: such a run cannot be repeated exactly.
    """
    config = client.config
    if config.min_class_count > 1:
        shared = client.data.graph.class_counts("train") >= config.min_class_count
        upload = upload.withhold(shared, config.min_class_count)
    if not config.upload_clip:
        return upload
    numbers = numbers_of(upload)
    known = numbers_of(download) if type(download) is type(upload) else []
    is_change = [t.shape for t in known] == [t.shape for t in numbers]
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    try:
        blurred = clip_and_blur(
            [tensor.detach().cpu() for tensor in numbers],
            clip=config.upload_clip,
            noise=config.upload_noise,
            origin=known if is_change else None,
            generator=generator,
        )
    except ValueError as error:
        raise PayloadError(f"{error}") from error
    changed: Payload = with_numbers(upload, iter(blurred))
    return changed.in_range()
