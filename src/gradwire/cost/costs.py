"""What methods take on a device: seconds of work between what they send, measured once, or computed for GPUs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError, did_you_mean
from gradwire.methods import name_of


@dataclass(frozen=True)
class Stage:
    """The work of a method between two rounds.

    Attributes:
        unit: Seconds a bucket.
        tensor: Seconds a parameter.
        value: Seconds a value.
        segment: Seconds a parameter and worker: what it takes to cut one among more owners.
        row: Seconds a value and worker: what it takes to read one more payload.
    """

    unit: float = 0.0
    tensor: float = 0.0
    value: float = 0.0
    segment: float = 0.0
    row: float = 0.0

    def seconds(self, tensors: int, values: int, workers: int) -> float:
        """For so much of a model in one bucket."""
        return self.unit + (self.tensor + self.segment * workers) * tensors + (self.value + self.row * workers) * values


@dataclass(frozen=True)
class Costs:
    """The work of a method: before its first round, after that, and so on.

    Attributes:
        stages: One for each; later ones are like the last.
        spread: Median relative distance of what was measured from what these say.
    """

    stages: tuple[Stage, ...] = (Stage(),)
    spread: float = 0.0

    def seconds(self, stage: int, tensors: int, values: int, workers: int) -> float:
        """Of a stage, from 0."""
        return self.stages[min(stage, len(self.stages) - 1)].seconds(tensors, values, workers)


FREE = Costs()
"""Of what takes no time."""


@dataclass(frozen=True)
class Profile:
    """What methods take on a device.

    Attributes:
        device: Its name.
        origin: Whether the numbers were measured there or computed from what a kernel reads and writes.
        about: When, how, with which versions.
        copy: Seconds a value in which DDP takes gradients over into its buckets; of one core.
        methods: Costs by :func:`key_of`.
    """

    device: str
    origin: Literal["measured", "computed"]
    about: str
    copy: float = 0.0
    methods: Mapping[str, Costs] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        """Whether there are costs of a method, with whatever options."""
        return any(_name(key) == name for key in self.methods)

    def of(self, configuration: Configuration) -> tuple[Costs, str]:
        """The costs of a method, and a note where they are not quite its own.

        Raises:
            ConfigurationError: If the profile has nothing of the method.
        """
        key = key_of(configuration)
        if key in self.methods:
            return self.methods[key], ""
        name = name_of(configuration.method)
        if not self.knows(name):
            known = ", ".join(sorted({_name(key) for key in self.methods}))
            raise ConfigurationError(
                f"the profile {self.device!r} has no costs of {name!r}: measure them here with 'gradwire bench costs "
                f"FILE.json {name}', or choose among {known}"
            )
        near = [known for known in self.methods if _name(known) == name]
        same_route = [known for known in near if known.split("/")[1] == configuration.route]
        taken = (same_route or near)[0]
        return self.methods[taken], f"encodes and decodes as fast as {taken}"

    def write(self, path: Path) -> None:
        """Writes it as JSON, making the folder where needed.

        Raises:
            ConfigurationError: If the path cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}; choose another path") from error

    @classmethod
    def of_plain(cls, content: Mapping[str, Any]) -> Profile:
        """One that ``dataclasses.asdict`` made plain."""
        methods = {
            key: Costs(tuple(Stage(**stage) for stage in costs["stages"]), costs["spread"])
            for key, costs in content["methods"].items()
        }
        return cls(**{**content, "methods": methods})

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads what :meth:`write` wrote.

        Raises:
            ConfigurationError: If the file is no profile.
        """
        try:
            return cls.of_plain(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is no profile of a device ({type(error).__name__}: {error}); make one with "
                f"'gradwire bench costs {path}'"
            ) from error


def key_of(configuration: Configuration) -> str:
    """A method with all options that are not its usual ones, its route, its granularity and whether it remembers."""
    method = configuration.method
    given = [
        f"{each.name}={getattr(method, each.name)}"
        for each in dataclasses.fields(method)  # type: ignore[arg-type]
        if getattr(method, each.name) != each.default
    ]
    given += [] if configuration.owner is None else [f"owner={configuration.owner}"]
    name = ":".join([name_of(method), *([",".join(given)] if given else [])])
    return "/".join([name, configuration.route, configuration.granularity.scope, str(configuration.memory)])


def _name(key: str) -> str:
    return key.split("/")[0].split(":")[0]


_FOLDER = Path(__file__).parent / "profiles"


def profile(name: str) -> Profile:
    """A profile that comes with gradwire, by name, or one in a file.

    Raises:
        ConfigurationError: If there is none.
    """
    from gradwire.cost.gpus import GPUS, computed

    if name in GPUS:
        return computed(name)
    known = {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}
    if name in known:
        return Profile.read(known[name])
    if name.endswith(".json"):
        return Profile.read(Path(name))
    choices = [*known, *GPUS]
    raise ConfigurationError(
        f"device={name!r} is not known; {did_you_mean(name, choices)}choose {', '.join(choices)}, or a file that "
        "'gradwire bench costs FILE.json' made"
    )
