"""One measurement of a plan, and what came of it."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from gradwire.errors import ConfigurationError, did_you_mean
from gradwire_bench import origin, shapes
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.kernels import Segments
from gradwire_bench.launch import NO_LINK, link_rate
from gradwire_bench.optimizers import OptimizerName
from gradwire_bench.placement import Backend, Device, Framework
from gradwire_bench.workloads import WORKLOADS

Kind = Literal["trial", "train", "local", "sync", "codec", "kernel", "gpu"]

_KINDS_WITH: dict[str, tuple[Kind, ...]] = {
    "route": ("trial", "train", "local", "sync"),
    "device": ("trial", "train", "gpu"),
    "framework": ("train",),
    "backend": ("train",),
}
"""Axes that some kinds of cells have only one value of."""

_CHOICES = {"kind": Kind, "optimizer": OptimizerName, "device": Device, "framework": Framework, "backend": Backend}

SCHEMA = "gradwire.bench.cell/1"
"""Of a record; docs/suite.md says what is in it."""


@dataclass(frozen=True)
class Cell:
    """What is measured, each field an axis of the plan.

    Attributes:
        kind: ``"trial"`` trains a small model with all workers in one process, for what it learns; ``"train"`` trains
            in real processes over a link, for time, too; ``"local"`` does so with local steps; ``"sync"`` times
            averages of a model's shapes; ``"codec"`` compresses recorded gradients; ``"kernel"`` times an inner loop;
            ``"gpu"`` is a subject of ``gradwire bench gpu``, and nothing that a plan can ask for.
        workload: Of :data:`~gradwire_bench.workloads.WORKLOADS`; for ``"sync"`` the shapes; for ``"kernel"`` how a
            gradient is cut, ``one`` or ``resnet``, and its values, ``one:25000000``; for ``"gpu"`` the part.
        method: A contender; for ``"kernel"`` the operation, for ``"gpu"`` the subject.
        granularity: Its granularity; empty for its own.
        optimizer: Of a training.
        rate: Learning rate at its peak, as a multiple of the workload's own.
        workers: How many.
        link: Rate of each worker's link, or ``"none"`` for the loopback.
        steps: Of training; before the recording, for a codec; timed ones, for an average or a kernel.
        batch: Samples a worker and step; 0 for the workload's own.
        every: Local steps from one average of what they changed to the next; 0 averages the gradient of every step.
        route: How payloads become an average; empty for the method's own.
        framework: What trains.
        backend: What the workers' collectives go through.
        device: Where the model computes.
        seed: Of the start, of the order of the samples, and of what is random in a method.
    """

    kind: Kind
    workload: str
    method: str
    granularity: str = ""
    optimizer: OptimizerName = "sgd"
    rate: float = 1.0
    workers: int = 4
    link: str = NO_LINK
    steps: int = 100
    batch: int = 0
    every: int = 0
    route: str = ""
    framework: Framework = "torch"
    backend: Backend = "gloo"
    device: Device = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in get_args(choices):
                raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(get_args(choices))}")
        for name, kinds in _KINDS_WITH.items():
            if self.kind not in kinds and (value := getattr(self, name)) != AXES[name].default:
                raise ConfigurationError(
                    f"{name}={value!r} is not for kind {self.kind!r}; leave it out, or choose kind {' or '.join(kinds)}"
                )
        if self.kind == "sync":
            shapes.get(self.workload)
        elif self.kind == "kernel":
            cut(self.workload)
        elif self.kind != "gpu" and self.workload not in WORKLOADS:
            hint = did_you_mean(self.workload, list(WORKLOADS))
            raise ConfigurationError(f"workload={self.workload!r} is not known; {hint}choose one of {[*WORKLOADS]}")
        for name, least in (("workers", 1), ("steps", 0), ("batch", 0), ("every", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigurationError(f"{name}={value!r} is out of range; choose at least {least}")
        if self.rate <= 0:
            raise ConfigurationError(f"rate={self.rate!r} is out of range; choose a multiple above 0")
        link_rate(self.link)
        if not self.races:
            return
        if self.framework != "torch" and (not Contender.parse(self.method).is_ours or self.device != "cpu"):
            raise ConfigurationError(
                f"framework={self.framework!r} trains with methods of gradwire, on the processor; 'dense' takes the "
                f"place of {DDP!r}, here are method={self.method!r} and device={self.device!r}"
            )
        Contender.parse(self.contender)

    @property
    def contender(self) -> str:
        """The method with its granularity and route, as on the command line."""
        chosen = [f"{name}={value}" for name in ("granularity", "route") if (value := getattr(self, name))]
        if not chosen or self.method == DDP:
            return self.method
        return f"{self.method}{',' if ':' in self.method else ':'}{','.join(chosen)}"

    @property
    def races(self) -> bool:
        """Whether its method is a contender, and no name of something that is timed by itself."""
        return self.kind not in ("kernel", "gpu")

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it: plain DDP, in other frameworks dense averages."""
        return self.method == (DDP if self.framework == "torch" else "dense")

    @property
    def unusual(self) -> tuple[str, ...]:
        """Framework, backend and device, but for torch over gloo on the processor."""
        axes = ("framework", "backend", "device")
        return tuple(getattr(self, axis) for axis in axes if getattr(self, axis) != AXES[axis].default)

    def setting(self, *but: str) -> tuple[tuple[str, object], ...]:
        """All axes but some: cells that have them in common can be compared."""
        return tuple((name, value) for name, value in vars(self).items() if name not in but)

    def matches(self, wanted: dict[str, Any]) -> bool:
        """Whether the cell has these values, or one of each list of them."""
        for name, value in wanted.items():
            here = getattr(self, name)
            if here not in value if isinstance(value, list) else here != value:
                return False
        return True

    def command(self, command: str) -> str:
        """What measures this cell alone, of a command that measures it among others."""
        axes = (f"{name}={value}" for name, value in vars(self).items())
        return f"{command} {shlex.join(part for each in axes for part in ('--only', each))}"


def cut(workload: str) -> tuple[Segments, int]:
    """How a kernel's gradient is cut, and its values.

    Raises:
        ConfigurationError: If the workload is of another form.
    """
    segments, _, numel = workload.partition(":")
    for known in get_args(Segments):
        if segments == known and numel.isdecimal() and int(numel) > 0:
            return known, int(numel)
    raise ConfigurationError(
        f"workload={workload!r} says no gradient of a kernel; write how it is cut, one of "
        f"{', '.join(get_args(Segments))}, and its values, such as one:25000000"
    )


AXES = {each.name: each for each in dataclasses.fields(Cell)}


@dataclass(frozen=True)
class Record:
    """What came of a cell.

    Attributes:
        cell: What was measured.
        result: The figures by name; empty where there is an error.
        seconds: What it took.
        command: What measures it again.
        date: When it ended, UTC.
        machine: Where, and with which versions.
        error: Why there is no result.
    """

    cell: Cell
    result: dict[str, Any]
    seconds: float
    command: str
    date: str
    machine: dict[str, Any]
    error: str | None = None

    @classmethod
    def now(cls, cell: Cell, result: dict[str, Any], seconds: float, command: str, error: str | None = None) -> Record:
        """Of a measurement that has just ended on this machine."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(cell, result, round(seconds, 3), command, date, origin.machine(), error)

    def plain(self) -> dict[str, Any]:
        """For a JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def of(cls, content: dict[str, Any]) -> Record:
        """From a JSON.

        Raises:
            ConfigurationError: If it is of another schema, or lacks something.
        """
        try:
            if content["schema"] != SCHEMA:
                raise ConfigurationError(f"it has the schema {content['schema']!r}, and this release reads {SCHEMA!r}")
            fields = {each.name: content[each.name] for each in dataclasses.fields(cls)}
            framework = content["result"].get("framework", "torch")  # where records had it before it was an axis
            return cls(**{**fields, "cell": Cell(**{"framework": framework, **content["cell"]})})
        except KeyError as error:
            raise ConfigurationError(f"it lacks {error}") from error
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(f"it is of another form: {error}") from error
