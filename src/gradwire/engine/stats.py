"""What an attachment counts."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.engine.guards import Audit
from gradwire.wire.transport import readable


@dataclass(frozen=True)
class Stats:
    """What this rank counted: in all since the method was attached, or since an earlier count.

    Attributes:
        steps: Synchronised steps.
        dense_bytes: What a dense all-reduce of the same gradients would have handed over to be sent; with ``inside=``
            what a dense average between nodes would have, of this rank's share.
        wire_bytes: What was handed over to be sent, as the collectives' algorithms send it.
        node_bytes: What was handed over to workers of the same node beside that, with ``inside=``.
        seconds: Time of the wire thread by stage: ``"encode"``, ``"wire"`` (waiting for collectives), ``"decode"``. On
            a GPU that of its stream, of what it is through with.
        audit: The newest audit, if there was any.
    """

    steps: int
    dense_bytes: int
    wire_bytes: int
    seconds: dict[str, float]
    audit: Audit | None = None
    node_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; infinite when nothing was sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else float("inf")

    def since(self, earlier: Stats) -> Stats:
        """What was counted after an earlier count of the same handle; its audit only if it is a newer one.

        Args:
            earlier: What ``stats()`` returned then.

        Example:
            >>> before = handle.stats()
            >>> handle.stats().since(before).steps
            0
        """
        audit = self.audit
        if audit is not None and earlier.audit is not None and audit.step == earlier.audit.step:
            audit = None if audit.layers == earlier.audit.layers else audit  # or the step was taken anew
        return Stats(
            self.steps - earlier.steps,
            self.dense_bytes - earlier.dense_bytes,
            self.wire_bytes - earlier.wire_bytes,
            {stage: seconds - earlier.seconds.get(stage, 0.0) for stage, seconds in self.seconds.items()},
            audit,
            self.node_bytes - earlier.node_bytes,
        )

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
            **({"node_bytes": self.node_bytes} if self.node_bytes else {}),
            **({"ratio": self.ratio} if self.wire_bytes else {}),
            **{f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()},
        }
        return {f"{prefix}{name}": number for name, number in numbers.items()}

    def __str__(self) -> str:
        spent = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        sent = f"{readable(self.wire_bytes)} sent, {self.ratio:.1f} times fewer bytes than dense"
        near = f", {readable(self.node_bytes)} within the node" if self.node_bytes else ""
        counted = f"{self.steps} steps, {sent if self.wire_bytes else 'nothing sent'}{near}"
        return f"{counted}; {spent}" if spent else counted
