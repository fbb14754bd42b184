"""What is found out on a GPU: bits, speeds, host waits, steps of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speed:
    """A kernel's.

    Attributes:
        kernel: What was timed.
        numel: Values of the gradient.
        microseconds: Median by CUDA events, with a cold cache.
        bytes_per_value: What it has to read and write at least.
        of_copy: The bandwidth that makes, as a share of a copy's.
        target: The least share that is promised, if any.
    """

    kernel: str
    numel: int
    microseconds: float
    bytes_per_value: float
    of_copy: float
    target: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether something is as it must be, and what is not."""

    subject: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Step:
    """A training step's median at world size 1, and what a method adds to DDP's own."""

    model: str
    method: str
    milliseconds: float
    overhead: float
    target: float


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        machine: Device, driver and versions.
        missing: Kernels that run by the reference there, slowly.
        copy: Bandwidth of a copy in GB/s, what is read and what is written together.
        bits: Each kernel against the reference on the CPU.
        speeds: Each kernel's.
        waits: Each method's step with waits for the device forbidden.
        steps: Each model's.
        failures: Parts that came to no end, and why.
    """

    machine: dict[str, Any]
    missing: tuple[str, ...]
    copy: float
    bits: list[Verdict]
    speeds: list[Speed]
    waits: list[Verdict]
    steps: list[Step]
    failures: list[str]


def lines(report: Report) -> Iterator[str]:
    """The report as plain text."""
    yield ", ".join(f"{name} {value}" for name, value in report.machine.items())
    yield f"copy: {report.copy:.0f} GB/s"
    yield f"by the reference: {', '.join(report.missing) or 'nothing'}"
    for verdict in (*report.bits, *report.waits):
        yield f"{'ok ' if verdict.holds else 'BAD'}  {verdict.subject:44} {verdict.found}"
    yield from (f"FAILED  {failure}" for failure in report.failures)
    for speed in report.speeds:
        target = "" if speed.target is None else f"  target {speed.target:.0%}"
        yield f"{speed.kernel:36} {speed.numel / 1e6:6g} M {speed.microseconds:9.1f} us {speed.of_copy:6.0%}{target}"
    for step in report.steps:
        measured = f"{step.milliseconds:8.2f} ms {step.overhead:+7.1%}"
        yield f"{step.model:12} {step.method:12} {measured}  target {step.target:.0%}"
