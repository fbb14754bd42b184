"""A method that asked for what nobody tells it says so."""

from __future__ import annotations

import logging

from gradwire.engine.guards.guard import Guard, Progress

_log = logging.getLogger("gradwire")


class Unobserved(Guard):
    """Tells, once and on one rank, of steps that a method of variance averages without the squares it is to be told.

    Every accumulated square then stays zero, so that nearly all is sent.

    Args:
        progress: The engine, which knows whether squares are observed.
        moments: Of which the method asked for squares.
        aloud: Whether this rank tells.
    """

    def __init__(self, progress: Progress, moments: str, *, aloud: bool) -> None:
        self._progress = progress
        self._moments = moments
        self._aloud = aloud

    def before_step(self) -> None:
        """Looks whether somebody observes."""
        if self._aloud and not self._progress.observed:
            self._aloud = False
            _log.warning(
                "moments=%r are told by nobody, so nearly all is sent; call gradwire.SecondMoments(model, handle, "
                "per=%r) right after attaching, or choose moments='step'",
                *(self._moments, self._moments),
            )
