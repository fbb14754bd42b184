"""A setting from what a user says of it: a model, workers, links, a device, how long a step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gradwire import units
from gradwire.cost import shapes, user
from gradwire.cost.costs import profile
from gradwire.cost.gpus import GPUS
from gradwire.cost.network import Level, Links
from gradwire.cost.shapes import THROUGHPUT, Model
from gradwire.cost.simulation import Setting
from gradwire.cost.workload import Workload
from gradwire.errors import ConfigurationError, did_you_mean

MOST_WORKERS = 10_000


@dataclass(frozen=True)
class Scene:
    """What a user says.

    Attributes:
        shapes: A known model, or ``file.py:make_model``.
        workers: All of them.
        link: Rate of a node's link, as written.
        latency: Of a message through it, as written.
        step_time: Seconds of a step without averages, or ``GPU:batch`` of a published throughput.
        device: A profile.
        gpus: Workers in a node, that share its link.
        near: Rate of a worker's link within a node.
        sites: Places that the nodes are divided among.
        far: Rate of a site's link to the others.
        far_latency: Of a message between sites.
        lost: Workers that have failed; the others go on.
        slowest: How many times as long as the others' the slowest worker's computation takes.
        cores: Cores that a worker has; None for one a GPU, and else for enough.
    """

    shapes: str = "resnet50"
    workers: int = 4
    link: str = "10gbit"
    latency: str = "50us"
    step_time: str = "0.3"
    device: str = "xeon"
    gpus: int = 1
    near: str = "2400gbit"
    sites: int = 1
    far: str = "1gbit"
    far_latency: str = "30ms"
    lost: int = 0
    slowest: float = 1.0
    cores: float | None = None

    def model(self) -> Model:
        """The model's shapes."""
        if user.is_own(self.shapes):
            return user.model(self.shapes, user.make(self.shapes))
        return shapes.get(self.shapes)

    def setting(self, model: Model | None = None, rate: float | None = None) -> Setting:
        """All of it, checked.

        Args:
            model: What :meth:`model` gave; made anew if None.
            rate: Bits a second of a node's link in place of what was said.

        Raises:
            ConfigurationError: If anything cannot be so.
        """
        model = self.model() if model is None else model
        left = self.workers - self.lost
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ConfigurationError(f"workers={self.workers!r} is out of range; give 1 to {MOST_WORKERS}")
        if not 1 <= left <= self.workers:
            raise ConfigurationError(f"lost={self.lost!r} of {self.workers} workers: give so few that some are left")
        if left % (self.gpus * self.sites):
            raise ConfigurationError(
                f"{left} workers cannot be {self.sites} sites of nodes with {self.gpus} workers each; "
                f"give a multiple of {self.gpus * self.sites}"
            )
        if self.gpus == 1 and self.near != Scene.near:
            raise ConfigurationError(f"near={self.near!r} is within nodes of several workers; give gpus, too")
        if self.sites == 1 and (self.far, self.far_latency) != (Scene.far, Scene.far_latency):
            raise ConfigurationError(f"far={self.far!r}, {self.far_latency} is between sites; give sites, too")
        bits = units.rate(self.link) if rate is None else rate
        nodes = Level(left // self.gpus // self.sites, bits, units.seconds(self.latency))
        near = Level(self.gpus, units.rate(self.near, "near"), 5e-6)
        far = Level(self.sites, units.rate(self.far, "far"), units.seconds(self.far_latency, "far_latency"))
        efficiency = 0.956
        between = [replace(each, rate=each.rate / self.gpus) for each in (nodes, far)]  # all places send at once
        levels = (Links((near,), 1.0), Links(tuple(between), efficiency)) if self.gpus > 1 else None
        taken, gpu = profile(self.device), self.device in GPUS
        cores = self.cores if self.cores is not None else 1.0 if gpu else math.inf
        return Setting(
            workload=Workload.of(model, self._step(), taken.copy),
            network=Links((near, nodes, far), efficiency),
            profile=taken,
            cores=cores,
            slowest=self.slowest,
            levels=levels,
        )

    def _step(self) -> float:
        """Seconds of a step, as given or from a published throughput."""
        try:
            return float(self.step_time)
        except ValueError:
            pass
        gpu, _, batch = self.step_time.partition(":")
        known = sorted(gpu for name, gpu in THROUGHPUT if name == self.shapes)
        if (self.shapes, gpu) not in THROUGHPUT or not batch.isdigit() or not int(batch):
            published = f", or one of {', '.join(f'{gpu}:64' for gpu in known)} for a batch of 64" if known else ""
            raise ConfigurationError(
                f"step_time={self.step_time!r} is not known; {did_you_mean(gpu, known)}give the seconds of a step on "
                f"one worker, such as 0.3{published}"
            )
        return int(batch) / THROUGHPUT[self.shapes, gpu]
