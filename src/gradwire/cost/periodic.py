"""Averages of parameters now and then: what they add to a step, at once or while steps go on.

Local SGD and PQASGD wait for an average; DiLoCo (Douillard et al. 2023, arXiv:2311.08105) has one in hundreds of steps;
Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512) averages fragments of the model at different steps, each
while some steps go on.
"""

from __future__ import annotations

from dataclasses import replace

from gradwire.cost.advice import Candidate
from gradwire.cost.simulation import Prediction, Setting, plain, simulate
from gradwire.errors import ConfigurationError


def spread_out(
    candidate: Candidate | None, setting: Setting, every: int, fragments: int = 1, delay: int = 0
) -> Prediction:
    """A mean step where each of some fragments of the parameters is averaged once in ``every`` steps.

    Args:
        candidate: What averages; None for plain float32.
        setting: Where; its backward passes hide nothing, as parameters change after them.
        every: Steps between two averages of a parameter.
        fragments: Parts that are averaged at different steps, equally far apart.
        delay: Steps that go on while a part is on its way.

    Raises:
        ConfigurationError: If fragments would come in the same step, or later than their next turn.
    """
    if not 1 <= fragments <= every or not 0 <= delay < every:
        raise ConfigurationError(
            f"fragments={fragments!r}, delay={delay!r} with every={every!r}: give 1 to {every} fragments and a delay "
            f"of 0 to {every - 1} steps, or a larger every"
        )
    step = setting.slowest * setting.workload.seconds
    slots = setting.workload.buckets
    alone = replace(setting, workload=replace(setting.workload, backward=(0.0,) * len(slots), forward=0.0), slowest=1.0)
    whole = plain(alone) if candidate is None else simulate(candidate.configuration, alone, candidate.label)

    def mean(average: float) -> float:
        part = average / fragments
        return step + fragments * max(0.0, part - delay * step) / every

    label = f"{whole.label}, every {every}"
    seconds = mean(whole.seconds)
    return replace(
        whole,
        label=label,
        seconds=seconds,
        low=mean(whole.low),
        high=mean(whole.high),
        exposed=seconds - step,
        wire_bytes=whole.wire_bytes / every,
        encode=whole.encode / every,
        decode=whole.decode / every,
        wire=whole.wire / every,
    )
