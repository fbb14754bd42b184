"""What races in a benchmark: plain DDP, PyTorch's own PowerSGD hook, and gradwire's methods with options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine.automatic import AUTO, Automatic
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.methods import parse
from gradwire.methods.variance import Moments
from gradwire.policy import DensePolicy

DDP = "ddp"
TORCH_POWERSGD = "torch-powersgd"
TORCH_FP16 = "torch-fp16"
FLOOR = "floor"
Option = bool | int | float | str

_CHOICES = ("granularity", "memory", "owner", "route", "inside", "fuse_bytes")
_OWN_OPTIONS = {DDP: set[str](), AUTO: set[str](), FLOOR: set[str](), TORCH_FP16: set[str](), TORCH_POWERSGD: {"rank"}}
"""Contenders that are not gradwire's, and what each takes."""


@dataclass(frozen=True)
class Contender:
    """One way to average gradients.

    Attributes:
        name: ``"ddp"`` for plain DDP in fp32, ``"torch-powersgd"`` for PyTorch's ``powerSGD_hook`` over one bucket,
            ``"torch-fp16"`` for its ``fp16_compress_hook``, ``"floor"`` for DDP that sends nothing, which no method can
            be faster than, ``"auto"`` for what gradwire chooses itself, else a method of gradwire.
        options: The method's options by name, in the order given, and ``granularity``, ``memory``, ``owner``,
            ``route``, ``inside`` and ``fuse_bytes`` as :func:`gradwire.compress` takes them. ``dense_below=n``
            compresses all tensors of at least n elements, those of one dimension too. ``bucket_mb`` is DDP's, for every
            contender.
    """

    name: str
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Reads ``name`` or ``name:option=value,option=value``, and checks it.

        Raises:
            ConfigurationError: If the text is malformed, or no such method or option exists.
        """
        name, options = parse(text)
        contender = cls(name, tuple(options.items()))
        contender._check()
        return contender

    def __str__(self) -> str:
        given = ",".join(f"{option}={value}" for option, value in self.options)
        return f"{self.name}:{given}" if given else self.name

    @property
    def label(self) -> str:
        """The name for tables and plots."""
        names = {
            DDP: "DDP fp32",
            TORCH_POWERSGD: "torch powerSGD_hook",
            TORCH_FP16: "torch fp16_compress_hook",
            FLOOR: "nothing sent",
        }
        return " ".join([names.get(self.name, self.name), *(f"{option}={value}" for option, value in self.options)])

    @property
    def is_ours(self) -> bool:
        """Whether it is a method of gradwire."""
        return self.name not in _OWN_OPTIONS

    def wrap(self, model: nn.Module, group: dist.ProcessGroup, *, init_sync: bool = True) -> Averaged:
        """Wraps a model in DDP over ``group`` and attaches the method. Every rank calls it at the same time.

        A method that asks for squares of samples or micro-batches is told them. DDP's broadcast of buffers is off: in
        every step nothing but gradients is to be sent.

        Args:
            model: The plain module.
            group: The processes to average over.
            init_sync: Whether DDP sends rank 0's parameters to all.
        """
        # PyTorch's hook mismatches or hangs on gloo as soon as there is a second bucket, so it gets one for all.
        bucket_cap_mb: Any = 1 << 20 if self.name == TORCH_POWERSGD else dict(self.options).get("bucket_mb")
        ddp = DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view=True,
            init_sync=init_sync,
            broadcast_buffers=False,
            bucket_cap_mb=bucket_cap_mb,
        )
        handle = None
        if self.name == TORCH_POWERSGD:
            rank = int(dict(self.options).get("rank", 4))
            state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook)
        elif self.name == FLOOR:
            ddp.register_comm_hook(None, noop_hook)
        elif self.name == TORCH_FP16:
            ddp.register_comm_hook(group, fp16_compress_hook)
        elif self.name != DDP:
            handle = gradwire.compress(ddp, self.name, **self.arguments())
            if self.moments != "step":
                gradwire.SecondMoments(ddp, handle, self.moments)
        return Averaged(ddp, handle)

    @property
    def moments(self) -> Moments:
        """Where a method has the squares of gradients from; ``"step"`` for those that ask for none."""
        if not self.is_ours:
            return "step"
        found: Moments = getattr(self.configuration().rules[0].method, "moments", "step")
        return found

    @property
    def bucket_bytes(self) -> int | None:
        """DDP's buckets, if they are not to be its usual ones."""
        size = dict(self.options).get("bucket_mb")
        return None if size is None else int(float(size) * 2**20)

    def configuration(self, seed: int = 0) -> Configuration:
        """The choices of a method of gradwire, made valid.

        Raises:
            ConfigurationError: If one is not allowed.
        """
        options, choices = self._parted()
        return Configuration.make(self.name, options, **choices, seed=seed)

    def arguments(self) -> dict[str, Any]:
        """What :func:`gradwire.compress`, or another way in, is given by name."""
        options, choices = self._parted()
        return {**options, **choices}

    def _parted(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The method's own options, and what goes with every method."""
        options: dict[str, Any] = dict(self.options)
        options.pop("bucket_mb", None)
        choices = {choice: options.pop(choice) for choice in _CHOICES if choice in options}
        if (below := options.pop("dense_below", None)) is not None:
            choices["dense"] = DensePolicy(below, vectors=False)
        return options, choices

    def _check(self) -> None:
        if self.name not in _OWN_OPTIONS:
            self.configuration()
            return
        allowed = _OWN_OPTIONS[self.name] | {"bucket_mb"}
        for option, value in self.options:
            if option not in allowed:
                raise ConfigurationError(f"{self.name} has no option {option!r}; it takes {sorted(allowed)}")
            if isinstance(value, bool | str) or value <= 0 or (option == "rank" and not isinstance(value, int)):
                kind = "a whole number of at least 1" if option == "rank" else "a number above 0"
                raise ConfigurationError(f"{self.name}: {option}={value!r} must be {kind}")


@dataclass(frozen=True)
class Averaged:
    """A model whose gradients are averaged.

    Attributes:
        model: The DDP model, or one whose parameters are averaged now and then.
        handle: gradwire's handle; ``None`` for contenders that are not gradwire's.
    """

    model: nn.Module
    handle: gradwire.Handle | None

    def sent_bytes(self) -> int | None:
        """Bytes that this rank handed over to be sent since attach; ``None`` where nobody counts."""
        return None if self.handle is None else int(self.handle.stats().wire_bytes)

    def stages(self) -> dict[str, float]:
        """Seconds of gradwire's wire thread since attach by stage; empty where nobody counts."""
        return {} if self.handle is None else dict(self.handle.stats().seconds)

    @property
    def undecided(self) -> bool:
        """Whether it is still being chosen what averages; the same on all ranks between two steps."""
        handle = self.handle
        if handle is None or not isinstance(handle.configuration, Automatic):
            return False
        return handle.wire.call(lambda: handle.advice) is None

    def finish(self) -> None:
        """Averages what the last local steps changed, where there are any."""
        if isinstance(self.handle, gradwire.Periodic):
            self.handle.synchronize()

    def close(self) -> None:
        """Ends what works in the background for this contender."""
        if self.handle is not None:
            self.handle.close()
