"""``gradwire bench train``: a real model on real data over a slow network, one method after another."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from gradwire.engine.recipes import EVERY
from gradwire.errors import ConfigurationError
from gradwire_bench import launch, placement
from gradwire_bench.cell import Cell
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.data import DataSource
from gradwire_bench.placement import Device, Framework
from gradwire_bench.settings import everyone
from gradwire_bench.workloads import WORKLOADS, Workload

DEFAULT_METHODS = (
    DDP,
    "bf16",
    *(line.method for line in EVERY),
    "efsignsgd",
    "topk:ratio=0.01",
    "powersgd:rank=4",
    "acpsgd:rank=4",
)
"""With what ``gradwire.compress(model)`` takes."""

ALL = "all"

_NEEDS: dict[str, tuple[str, ...]] = {
    "keras-tf": ("keras", "tensorflow"),
    "keras-jax": ("keras", "jax"),
    "jax": ("keras", "jax", "optax"),
}


_QUIET = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
_ENVIRONMENT: dict[Framework, dict[str, str]] = {
    "torch": {},
    "keras-tf": {"KERAS_BACKEND": "tensorflow", "TF_NUM_INTRAOP_THREADS": "1", **_QUIET},
    "keras-jax": {"KERAS_BACKEND": "jax", **_QUIET},
    "jax": {"KERAS_BACKEND": "jax", **_QUIET},
}


@dataclass(frozen=True)
class CurvePoint:
    """Accuracy during training.

    Attributes:
        step: Steps done.
        seconds: Training time so far in seconds, evaluations not counted.
        accuracy: Share of the test samples of one evaluation that were answered rightly.
    """

    step: int
    seconds: float
    accuracy: float


@dataclass
class TrainRow:
    """One contender's training.

    Attributes:
        method: The contender as written on the command line.
        label: The contender's name for tables and plots.
        steps_done: Steps so far.
        loss: The last step's loss on rank 0.
        curve: Accuracy from time to time on a fixed part of the test samples.
        step_seconds: Each step's time in seconds.
        speedup: How many times shorter than DDP fp32's the median step is.
        dense_bytes: Bytes a worker and step that a dense ring all-reduce of the gradient sends.
        metered_bytes: Bytes a worker and step handed over to be sent, by gradwire's meter; mean over workers.
        interface_bytes: Bytes a worker and step that its network interface sent, headers included.
        accuracy: Share of all test samples answered rightly at the end.
        target_accuracy: The accuracy to reach.
        seconds_to_target: Training time to the first point of the curve at the target or above; ``None`` if none is.
        losses: Each step's loss on rank 0.
        phases: Median seconds a step of rank 0: ``"forward"``, ``"backward"`` (until the gradients are averaged),
            ``"update"``; and of its wire thread, which works beside: ``"encode"``, ``"wire"``, ``"decode"``.
        peak_bytes: Resident memory of rank 0 at its highest, Python and torch included; None where no one tells.
        parameters: Digest of the model's bits on rank 0 at the end; None in other frameworks than torch.
        framework: What trained.
        error: Why there is no result.
    """

    method: str
    label: str
    target_accuracy: float
    steps_done: int = 0
    loss: float | None = None
    curve: list[CurvePoint] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    speedup: float | None = None
    dense_bytes: float | None = None
    metered_bytes: float | None = None
    interface_bytes: float | None = None
    accuracy: float | None = None
    seconds_to_target: float | None = None
    losses: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    parameters: str | None = None
    framework: Framework = "torch"
    error: str | None = None

    @property
    def median_seconds(self) -> float | None:
        """The median step."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def sent_bytes(self) -> float | None:
        """Bytes sent a worker and step: by the meter, for plain DDP by the formula of its ring all-reduce."""
        return self.dense_bytes if self.metered_bytes is None else self.metered_bytes

    @property
    def ratio(self) -> float | None:
        """How many times fewer bytes than dense."""
        return self.dense_bytes / self.sent_bytes if self.dense_bytes and self.sent_bytes else None


def contenders(methods: Sequence[str], framework: Framework = "torch") -> list[Contender]:
    """The contenders of a run: the default ones, or those asked for with DDP fp32 before them to compare with.

    ``all`` stands for every method of the catalogue at its recommended settings. In other frameworks ``"dense"`` takes
    DDP's place.

    Raises:
        ConfigurationError: If one is torch's own, and the framework another.
    """
    texts = [text for each in methods or DEFAULT_METHODS for text in (everyone() if each == ALL else (each,))]
    chosen = [Contender.parse(text) for text in texts]
    if framework == "torch":
        return list(dict.fromkeys([Contender(DDP), *chosen]))
    chosen = [each for each in chosen if each.name != DDP]
    if torchs := [each for each in chosen if not each.is_ours]:
        raise ConfigurationError(f"{torchs[0].name} is torch's; leave it out, or choose --framework torch")
    return list(dict.fromkeys([Contender("dense"), *chosen]))


def check_framework(framework: Framework, workload: Workload, device: Device = "cpu") -> None:
    """Raises ConfigurationError if a framework is not installed, or does not have this workload on this device."""
    if framework == "torch":
        return
    if workload.name != "image":
        raise ConfigurationError(
            f"workload {workload.name!r} is in torch only; with --framework {framework} take 'image'"
        )
    if device != "cpu":
        raise ConfigurationError(
            f"--framework {framework} trains on the processor, not with device {device!r}; choose device 'cpu', or "
            "framework 'torch'"
        )
    for package in _NEEDS[framework]:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"--framework {framework} needs {package}, which is not installed; run "
                f"pip install {' '.join(_NEEDS[framework])}"
            )


def race(cells: Sequence[Cell], source: DataSource, on_progress: Callable[[list[TrainRow]], object]) -> list[TrainRow]:
    """Trains with each contender in turn, in the same worker processes.

    Args:
        cells: One for each, dense averages among them; they differ in their methods alone.
        source: The data that all learn from.
        on_progress: Called with the rows so far after every step.

    Returns:
        A row for every cell; one that failed says why.

    Raises:
        ConfigurationError: If there is no such device here, or too few of them.
    """
    first = cells[0]
    placement.check(first.device, first.backend, first.workers)
    workload, framework = WORKLOADS[first.workload], first.framework
    rows = [
        TrainRow(cell.contender, Contender.parse(cell.contender).label, workload.target(source), framework=framework)
        for cell in cells
    ]
    job = {
        **asdict(first),
        "source": source.plain(),
        "methods": [row.method for row in rows],
        "batch": first.batch or workload.batch,
    }

    def on_step(row: TrainRow, event: launch.Event) -> None:
        row.steps_done, row.loss = event["step"], event["loss"]
        if event["accuracy"] is not None:
            row.curve.append(CurvePoint(event["step"], event["elapsed"], event["accuracy"]))
            if row.seconds_to_target is None and event["accuracy"] >= row.target_accuracy:
                row.seconds_to_target = event["elapsed"]

    launch.race(
        f"gradwire_bench.{'train_worker' if framework == 'torch' else 'framework_worker'}",
        job,
        first.workers,
        first.link,
        rows,
        on_step,
        lambda: on_progress(rows),
        _ENVIRONMENT[framework],
    )
    dense = rows[0].median_seconds
    for row in rows:
        if dense and row.median_seconds:
            row.speedup = dense / row.median_seconds
    return rows
