"""The errors gradwire raises, each quoting the value, what is allowed, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradwireError(Exception):
    """Base of every error that is gradwire's own."""


class ConfigurationError(GradwireError, ValueError):
    """An option, method or model that cannot be used as asked; nothing was changed."""


class PayloadError(GradwireError, ValueError):
    """Bytes from the wire that no encoder of this configuration can have produced."""


class DivergenceError(GradwireError):
    """Averages, or what they left of a model, that are not the same bits on all ranks; raised on every rank."""


class WireError(GradwireError, RuntimeError):
    """A collective that did not come to its end, because a worker ended, stopped or failed.

    Args:
        operation: What was under way and with whom, such as ``"all-gather of 1.2 MB with 3 others"``.
        seconds: How long this rank waited for it.
        timeout: The process group's timeout in seconds; None if it is not known.
        said: What the backend said.

    Attributes:
        step: Steps that this handle had done before; None if no step was under way.
        round: Which of the step's dependent collectives it was, from 0.
    """

    def __init__(self, operation: str, seconds: float, timeout: float | None, said: str) -> None:
        super().__init__(operation, seconds, timeout, said)
        self.operation = operation
        self.seconds = seconds
        self.timeout = timeout
        self.said = said
        self.step: int | None = None
        self.round: int | None = None

    def __str__(self) -> str:
        place = "" if self.step is None else f" in step {self.step}, round {self.round},"
        limit = "an unknown timeout" if self.timeout is None else f"the process group's timeout of {self.timeout:g} s"
        if self.timeout is not None and self.seconds >= 0.9 * self.timeout:
            why = (
                f"no answer within {limit}: a worker hangs, was stopped or is far behind; look at what each of them "
                "does, and give init_process_group a longer timeout if a step may take longer"
            )
        else:
            why = f"the connection was closed (before {limit}): a worker ended or failed; its own output says why"
        return (
            f"{self.operation}{place} failed after {self.seconds:.1f} s: {why}. This handle can do no more: start all "
            f"workers again from the last checkpoint. The backend said: {self.said}"
        )


class LabError(GradwireError, RuntimeError):
    """The shaped-network laboratory cannot be built or used here."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """For messages: what was probably meant, as a question with a space behind it; nothing if nothing is near."""
    names = {each.lower(): each for each in known}
    near = [names[each] for each in difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.55)]
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""
