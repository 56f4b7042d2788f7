"""What a client does to an upload before it is packed, whatever its method."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.differential_privacy import (
    clip_and_add_noise,
    numbers_of,
    refuse_unbounded,
    with_numbers,
)

__all__ = ["privatize"]


def privatize(client: Client, upload: Payload, download: Any = None) -> Payload:
    """Withhold, clip and blur what the settings say.

    Parameters
    ----------
    client : Client
        Its settings say ``min-class-count``, ``upload-clip`` and ``upload-noise``.
    upload : Payload
        What the method wants to upload.
    download : Payload, optional
        What it made the upload from, known to the server. Of weights, which both hold
        under the same names, the difference is clipped.

    Returns
    -------
    Payload
        What may leave the client.

    Raises
    ------
    PayloadError
        If a number is not finite, or stands where it cannot be clipped.

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
    try:
        refuse_unbounded(upload)
    except TypeError as error:
        raise PayloadError(f"upload-clip: {error}") from error
    numbers = numbers_of(upload)
    start = origin_of(numbers, numbers_of(download))
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    try:
        blurred = clip_and_add_noise(
            [tensor.detach().cpu() for tensor in numbers.values()],
            clip=config.upload_clip,
            noise=config.upload_noise,
            origin=start,
            generator=generator,
        )
    except ValueError as error:
        raise PayloadError(f"{error}") from error
    changed: Payload = with_numbers(upload, dict(zip(numbers, blurred, strict=True)))
    return changed.in_range()


def origin_of(
    numbers: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the point around which each tensor of an upload is clipped.

    Parameters
    ----------
    numbers, known : mapping of str to Tensor
        Those of the upload and of the download, by place.

    Returns
    -------
    list of Tensor
        For an entry of a mapping (weights by name) what the download has in the same
        place and shape; else zeros.
    """
    return [
        known[place].detach().cpu()
        if place.count("/") > 1
        and place in known
        and known[place].shape == tensor.shape
        else torch.zeros_like(tensor, device="cpu")
        for place, tensor in numbers.items()
    ]
