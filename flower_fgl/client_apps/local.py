"""Client half of local training: every client trains alone and uploads nothing."""

from collections.abc import Sequence

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    why_checked_alone,
)
from flower_fgl.nn import Backbone
from flower_fgl.protocols.base import Empty

__all__ = ["LocalClientApp"]


class LocalClientApp(GroupClientApp):
    """Continue from the client's last weights; all clients start from the same."""

    stacked = True
    down = Empty
    up = Empty

    def fit_group(self, group: Group, downloads: Sequence[Empty]) -> GroupFit:
        """Train for another ``local-epochs``."""
        model = group.build_own()
        return GroupFit(model, [Empty()] * len(group), group.train(model))

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients that ``check-every`` stops one by one."""
        return why_checked_alone(client.config)

    def personal_model(self, client: Client, download: Empty | None) -> Backbone:
        """Return the model trained last, or the initial one before the first training."""
        return client.own_model()
