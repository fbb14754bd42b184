"""Every way to attach every method: what the laws are held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gradwire import memory as memories
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.memory import MaskedMomentum, Memory, Momentum

# Options under which a method does something visible on tensors as small as the tests'.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [{"bits": 2}, {"bits": 4}, {"bits": 8}, {"bits": 4, "norm": "l2"}],
    "alq": [{}, {"bits": 8, "every": 1}],
    "amq": [{"bits": 8}],
    "topk": [
        {"ratio": 0.05},
        {"ratio": 0.1, "values": "fp16"},
        {"ratio": 0.1, "values": "qsgd:4", "indices": "entropy"},
        {"ratio": 0.1, "values": "sign", "indices": "raw"},
        {"ratio": 0.1, "values": "quantile:16"},
        {"ratio": 0.5, "indices": "bitmap"},
    ],
    "deadzone": [{"bits": 1.0}, {"bits": 0.05}, {"bits": 4.0}],
    "subspace": [{"bits": 1.0, "rank": 2}, {"bits": 0.05, "rank": 1}],
    "dithered": [{"bits": 0.5}, {"bits": 4.0}],
    "dion": [{}, {"rank_fraction": 0.1, "momentum": 0.0}],
    "eden": [{"rotation": 64}, {"bits": 1}, {"bits": 2, "rotation": 256}],
    "efsignsgd": [{}, {"norm": "l2"}],
    "dgc": [{"ratio": 0.1}, {"ratio": 0.05, "warmup": 3, "indices": "entropy"}],
    "ef21": [{"ratio": 0.1}, {"ratio": 0.2, "indices": "entropy"}],
    "ef21sgdm": [{"ratio": 0.1}, {"ratio": 0.2, "indices": "entropy"}],
    "lioncub": [{"sync": 2}, {"sync": 0, "bits": 4}, {"bits": 8}],
    "globalqsgd": [{}, {"bits": 4}],
    "gtopk": [{"ratio": 0.05}, {"ratio": 0.3, "indices": "raw"}],
    "sketchml": [
        {"ratio": 0.1},
        {"ratio": 0.3, "buckets": 16, "rows": 0, "indices": "entropy"},
        {"ratio": 0.5, "rows": 1, "columns": 0.1, "groups": 2},
    ],
    "threshold": [
        {"threshold": 0.5},
        {"threshold": 2.0, "values": "sign", "indices": "raw"},
        {"threshold": 0.7, "indices": "entropy"},
        {"threshold": 100.0},
    ],
    "adaptive": [{"capacity": 0.5}, {"values": "qsgd:4", "indices": "entropy"}],
    "gaussiank": [{"ratio": 0.1}, {"ratio": 0.05, "values": "fp16", "indices": "entropy"}],
    "sidco": [{"ratio": 0.1}, {"ratio": 0.05, "values": "fp16", "indices": "entropy"}],
    "strom": [
        {"threshold": 0.5},
        {"threshold": 1.0, "indices": "entropy"},
        {"threshold": 2.0, "capacity": 0.001, "indices": "raw"},
    ],
    "variance": [{"alpha": 0.5, "capacity": 0.3, "values": "fp32"}, {"alpha": 0.9, "indices": "entropy"}],
    "hybrid": [{"threshold": 0.5}, {"threshold": 0.7, "alpha": 0.5, "capacity": 0.3, "indices": "entropy"}],
    "adacomp": [{}, {"bin": 20, "capacity": 0.3, "indices": "entropy"}],
    "inceptionn": [{}, {"room": 32}, {"bound": 2.0**-24, "room": 8}],
    "dryden": [{"ratio": 0.1}, {"ratio": 0.5, "indices": "raw"}, {"ratio": 0.2, "indices": "entropy"}],
    "randomk": [{"ratio": 0.1}],
    "gspar": [{"ratio": 0.1}, {"ratio": 0.3, "rounds": 0, "indices": "entropy"}],
    "sbc": [{"ratio": 0.1}, {"ratio": 0.3, "indices": "entropy"}],
    "natural": [{"bits": 8}, {"bits": 9}],
    "scalecom": [{"ratio": 0.05}],
    "oktopk": [{"ratio": 0.05}, {"ratio": 0.3, "margin": 1.0, "recut": 2, "indices": "raw"}],
    "qgz": [{}, {"bits": 8}],
    "sdp4bit": [{}, {"bits": 8}],
    "powersgd": [{"rank": 2}, {"rank": 2, "bits": 16}],
    "acpsgd": [{"rank": 2}, {"rank": 2, "bits": 16}],
    "atomo": [{"rank": 2}],
    "gradiveq": [
        {"slice": 32, "rank": 5, "learn_steps": 1, "use_steps": 2},
        {"slice": 100, "rank": 20, "learn_steps": 2, "use_steps": 1},
    ],
    "greedylore": [{"rank": 2, "refresh": 3}],
    "demo": [{"topk": 3}, {"topk": 2, "chunk": 16, "sign": False, "values": "fp16"}],
    "thc": [{"rotation": 64, "grain": 100}],
    "sketchedsgd": [{"ratio": 0.05, "rows": 3, "columns": 8.0, "candidates": 2}],
}


@dataclass(frozen=True)
class Case:
    """One attachment."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    granularity: str = "layer"
    route: str = "allreduce"
    memory: str | Memory = "none"

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.options, "granularity": self.granularity, "route": self.route, "memory": self.memory}

    @property
    def choices(self) -> tuple[str, str, str]:
        """Granularity, route and memory."""
        return self.granularity, self.route, self.memory

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.method}({options})-{self.granularity}-{self.route}-{self.memory}"


def cases(memory: str | None = None) -> list[Case]:
    """All names, on all their routes, with one memory or with all they can carry.

    The first options go through all granularities with and without error feedback, and with whole layers through every
    memory; other options come with whole layers and with the method's own memory or error feedback.
    """
    return [case for case in _cases(tuple(methods.names())) if memory in (None, case.memory)]


@cache
def _cases(names: tuple[str, ...]) -> list[Case]:
    found = []
    for name in names:
        kind = methods.get(name)
        first, *others = OPTIONS.get(name, [{}])
        combinations = [
            (first, scope, carried)
            for scope in scopes(kind)
            for carried in possible_memories(kind, first, scope)
            if carried in ("none", "residual") or scope == kind.granularities[0]
        ]
        combinations += [
            (options, kind.granularities[0], carried)
            for options in others
            for carried in possible_memories(kind, options)
            if carried in (kind.memory, "residual")
        ]
        found += [
            Case(name, options, scope, route, carried)
            for options, scope, carried in combinations
            for route in kind.routes
        ]
    return found


def scopes(kind: type[methods.Method]) -> list[str]:
    """Granularities, the usual one first; blocks are small enough for the tests' tensors to have many."""
    usual, *others = (each if ":" in each else each.replace("block", "block:96") for each in kind.granularities)
    return [usual, *others, *(["block:96"] if usual.startswith("block") else [])]


def possible_memories(
    kind: type[methods.Method], options: dict[str, Any] | None = None, granularity: str | None = None
) -> list[str | Memory]:
    """Some mask coordinates, some need operators without bias or whose remainder shrinks."""
    made = kind(**options or {})
    own = [kind.memory] if isinstance(kind.memory, Memory) else []
    return [each for each in (*kind.memories, *own) if accepted(made, each, granularity)]


def has_momentum(kind: type[methods.Method]) -> bool:
    """Whether its usual memory is a momentum."""
    return isinstance(memories.parse(kind.memory), Momentum | MaskedMomentum)


def accepted(method: methods.Method, memory: str | Memory, granularity: str | None) -> bool:
    """Whether a method takes a memory of its list with these options."""
    try:
        Configuration.make(method, {}, granularity, memory=memory)
    except ConfigurationError:
        return False
    return True
