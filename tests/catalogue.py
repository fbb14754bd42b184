"""Every way to attach every method: what the laws are held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradwire import memory as memories
from gradwire import methods

# Options under which a method does something visible on tensors as small as the tests'.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [{"bits": 2}, {"bits": 4}, {"bits": 8, "bucket": 64}, {"bits": 4, "norm": "l2", "bucket": 0}],
    "topk": [
        {"ratio": 0.05},
        {"ratio": 0.1, "values": "fp16"},
        {"ratio": 0.1, "values": "qsgd:4"},
        {"ratio": 0.1, "values": "sign", "indices": "raw"},
    ],
    "threshold": [{"threshold": 0.5}, {"threshold": 2.0, "values": "sign", "indices": "raw"}, {"threshold": 100.0}],
    "adaptive": [{"capacity": 0.5}, {"values": "qsgd:4"}],
    "sidco": [{"ratio": 0.1}, {"ratio": 0.05, "values": "fp16"}],
    "strom": [{"threshold": 0.5}, {"threshold": 2.0, "capacity": 0.001, "indices": "raw"}],
    "variance": [{"alpha": 0.5, "capacity": 0.3, "values": "fp32"}, {"alpha": 0.9}],
    "hybrid": [{"threshold": 0.5}, {"threshold": 0.7, "alpha": 0.5, "capacity": 0.3}],
    "adacomp": [{}, {"bin": 20, "capacity": 0.3}],
    "dryden": [{"ratio": 0.1}, {"ratio": 0.5, "indices": "raw"}],
    "randomk": [{"ratio": 0.1}],
    "powersgd": [{"rank": 2}],
    "acpsgd": [{"rank": 2}],
}


@dataclass(frozen=True)
class Case:
    """One attachment."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    granularity: str = "layer"
    route: str = "allreduce"
    memory: str = "none"

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.options, "granularity": self.granularity, "route": self.route, "memory": self.memory}

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.method}({options})-{self.granularity}-{self.route}-{self.memory}"


def cases(memory: str | None = None) -> list[Case]:
    """All names, with all their options, granularities and routes, and both memories unless one is given."""
    found = []
    for name in methods.names():
        kind = methods.get(name)
        for options in OPTIONS.get(name, [{}]):
            for scope in kind.granularities:
                for route in kind.routes:
                    for carried in kind.memories if memory is None else (memory,):
                        if memories.NAMES[carried]().masks and name not in ("topk", "randomk"):
                            continue
                        granularity = "block:96" if scope == "block" else scope
                        found.append(Case(name, options, granularity, route, carried))
    return found
