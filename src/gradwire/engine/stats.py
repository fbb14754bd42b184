"""What an attachment counts."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.engine.guards import Audit


@dataclass(frozen=True)
class Stats:
    """Totals of this rank since the method was attached.

    Attributes:
        steps: Synchronised steps.
        dense_bytes: What a dense all-reduce of the same gradients would have handed over to be sent.
        wire_bytes: What was handed over to be sent, as the collectives' algorithms send it.
        seconds: Time of the wire thread by stage: ``"encode"``, ``"wire"`` (waiting for collectives), ``"decode"``. On
            a GPU that of its stream, of what it is through with.
        audit: The newest audit, if there was any.
    """

    steps: int
    dense_bytes: int
    wire_bytes: int
    seconds: dict[str, float]
    audit: Audit | None = None

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; infinite when nothing was sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else float("inf")

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Plain numbers by name, as loggers take them: ``wandb.log(handle.stats().as_dict("gradwire/"))``.

        The ratio is left out until something was sent.

        Args:
            prefix: What every name begins with.
        """
        numbers: dict[str, float] = {
            "steps": self.steps,
            "dense_bytes": self.dense_bytes,
            "wire_bytes": self.wire_bytes,
            **({"ratio": self.ratio} if self.wire_bytes else {}),
            **{f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()},
        }
        return {f"{prefix}{name}": number for name, number in numbers.items()}
