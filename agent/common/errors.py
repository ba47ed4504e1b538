"""Define the agent's errors; each carries a stable code, what was found, what was expected, and the remedy."""

from __future__ import annotations

from calibrate.errors import TaredError


class AgentError(TaredError):
    """Base of everything the agent reports to its user."""


class ConfigError(AgentError):
    """config.yaml or a model spec that cannot be used."""

    @property
    def lines(self) -> list[str]:
        """The errors that it lists; one if it lists none."""
        first, *listed = self.found.rstrip().split("\n  ")
        return listed or [f"{first}; expected {self.expected}"]


class CameraError(AgentError):
    """A source that cannot be opened, or that ends where it should not."""


class DatasetError(AgentError):
    """A labelled data set that cannot be evaluated."""


class CommandError(AgentError):
    """A command from the operator that is refused."""
