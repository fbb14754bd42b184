"""The errors gradwire raises, each quoting the value, what is allowed, and the remedy."""

from __future__ import annotations


class GradwireError(Exception):
    """Base of every error that is gradwire's own."""


class ConfigurationError(GradwireError, ValueError):
    """An option, method or model that cannot be used as asked; nothing was changed."""


class PayloadError(GradwireError, ValueError):
    """Bytes from the wire that no encoder of this configuration can have produced."""


class LabError(GradwireError, RuntimeError):
    """The shaped-network laboratory cannot be built or used here."""
