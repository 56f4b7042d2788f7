"""Client half of FedPANO, for one client and for many, and its training."""

from flower_fgl.client_apps.fedpano.client_app import FedPANOClientApp

__all__ = ["FedPANOClientApp"]
