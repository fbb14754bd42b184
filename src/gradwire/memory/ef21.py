"""EF21: workers send what changed, and everybody knows the sum of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.deferred import copy_where
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.residual import Residual
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _DifferenceFeedback(Feedback):
    residual: Tensor
    estimate: Tensor

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """From ``g - h - c``, which the encoder left, to ``-(h + c)``."""
        kernels.accumulate(block, admitted, self.residual, 1.0, -1.0)

    def after_decode(self, block: Block, average: Tensor) -> None:
        """``H += mean c``; the average is ``H``, unless what came is not finite."""
        finite = kernels.accumulate(block, average, self.estimate, 1.0, 1.0)
        for estimate, part in zip(block.parts(self.estimate), block.parts(average), strict=True):
            copy_where(finite, estimate, part)


@dataclass(frozen=True)
class EF21(Memory):
    """Compressed differences (Richtarik et al. 2021, arXiv:2106.05203): ``c = C(g - h)``, ``h += c``, ``H += mean c``.

    Each worker's estimate ``h`` of its own gradient goes towards it with every step, and the average applied is the
    mean ``H`` of all workers' estimates, which every rank keeps. The residual holds ``-h``.

    Where an average is compressed again this is EF21-BC (Fatkhullin et al. 2021, arXiv:2110.03294): the owner sends
    ``C(mean h - H)``, and ``mean h - H`` is what is left of all differences after what it sent of them, its residual.
    """

    def bears(self, remainder: Remainder) -> bool:
        """Differences must become smaller."""
        return remainder == "shrinks"

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps two float32 an element."""
        lag = store.flat(field, slots, numel, kind)
        return _DifferenceFeedback(residual=lag, estimate=store.flat(f"{field}.estimate", slots, numel, Kind.SHARED))

    def estimates(self, field: str) -> tuple[str, str]:
        """The worker's, which the residual holds negative, and the sum."""
        return field, f"{field}.estimate"

    def owner(self) -> Memory:
        """How far what everybody knows is behind the mean of the workers' estimates."""
        return Residual()

    def __str__(self) -> str:
        return "ef21"
