"""Protection of an upload before it leaves the client: withholding, clipping, noise."""

from __future__ import annotations

from typing import Any

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.differential_privacy import (
    clip_and_add_noise,
    numbers_of,
    origin_of,
    refuse_unbounded,
    with_numbers,
)

__all__ = ["privatize"]


def privatize(client: Client, upload: Payload, download: Any = None) -> Payload:
    """Withhold rare classes, clip and add noise; PayloadError if a field has no clipping.

    With ``upload-noise-model = "distributed"`` the client adds its share of the noise
    when the upload is encoded for the secure sum. For weights that upload and download
    both contain under the same names, the difference is clipped. The noise must not be
    reproducible: its seed comes from the operating system, and such a run cannot be
    repeated exactly.
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
    is_distributed = config.upload_noise_model == "distributed"
    numbers = numbers_of(upload)
    start = origin_of(numbers, numbers_of(download))
    try:
        noised = clip_and_add_noise(
            [tensor.detach().cpu() for tensor in numbers.values()],
            clip=config.upload_clip,
            noise=0.0 if is_distributed else config.upload_noise,
            origin=start,
        )
    except ValueError as error:
        raise PayloadError(f"{error}") from error
    changed: Payload = with_numbers(upload, dict(zip(numbers, noised, strict=True)))
    return changed.in_range()
