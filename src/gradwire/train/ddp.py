"""The way in for ``DistributedDataParallel``: a communication hook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot, flat_slots
from gradwire.memory import Memory
from gradwire.methods import Method
from gradwire.train.configuration import FUSE_BYTES, Configuration
from gradwire.train.handle import VERIFY_EVERY, Handle, checked_verification
from gradwire.train.policy import DensePolicy
from gradwire.train.unit import Unit
from gradwire.wire import Synchronization, Wire
from gradwire.wire.wire import TensorFuture


class _Buckets:
    """Averages each bucket as it comes."""

    def __init__(self, handle: Handle, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._handle = handle
        self._names = {id(parameter): name for name, parameter in parameters}
        self._units: dict[int, tuple[tuple[int, ...], Unit]] = {}

    def on_bucket(self, bucket: GradBucket) -> TensorFuture:
        """Queues a bucket; its future holds the averaged buffer."""
        wire, engine = self._handle.wire, self._handle.engine
        buffer, index, parameters, last = bucket.buffer(), bucket.index(), bucket.parameters(), bucket.is_last()
        future = wire.promise(otherwise=buffer)
        staged = buffer if buffer.dtype == torch.float32 else torch.empty_like(buffer, dtype=torch.float32)

        def begin() -> list[Synchronization]:
            if staged is not buffer:
                staged.copy_(buffer)
            synchronizations = engine.synchronizations(self._unit(index, parameters), staged)
            engine.count(buffer, last)
            return synchronizations

        def done() -> None:
            engine.landed(self._unit(index, parameters), staged)
            wire.keep(future, buffer if staged is buffer else buffer.copy_(staged))

        wire.submit(begin, done, engine.ended if last else None)
        return future

    def _unit(self, index: int, parameters: list[Tensor]) -> Unit:
        """How a bucket is handled; made anew when DDP has rebuilt its buckets."""
        identity = tuple(id(parameter) for parameter in parameters)
        known = self._units.get(index)
        if known is None or known[0] != identity:
            slots = flat_slots([(self._names[id(each)], tuple(each.shape)) for each in parameters])
            known = (identity, self._handle.engine.unit(slots))
            self._units[index] = known
        return known[1]


class _WholeModel:
    """Collects all buckets of a step, then averages them as one buffer in the model's order."""

    def __init__(self, handle: Handle, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._handle = handle
        slots = flat_slots([(name, tuple(parameter.shape)) for name, parameter in parameters])
        self._slots: dict[int, Slot] = {
            id(parameter): slot for (_, parameter), slot in zip(parameters, slots, strict=True)
        }
        self._unit = handle.engine.unit(slots)
        self._flat = torch.zeros(self._unit.numel, dtype=torch.float32, device=parameters[0][1].device)
        self._waiting: list[tuple[TensorFuture, Tensor, list[Slot]]] = []

    def on_bucket(self, bucket: GradBucket) -> TensorFuture:
        """Takes in a bucket; the last one of a step sets all of them going."""
        wire, engine = self._handle.wire, self._handle.engine
        buffer, last = bucket.buffer(), bucket.is_last()
        slots = [self._slots[id(parameter)] for parameter in bucket.parameters()]
        future = wire.promise(otherwise=buffer)

        def begin() -> list[Synchronization]:
            self._waiting.append((future, buffer, slots))
            for slot, values in zip(slots, torch.split(buffer, [slot.numel for slot in slots]), strict=True):
                self._flat[slot.offset : slot.stop].copy_(values)
            synchronizations = engine.synchronizations(self._unit, self._flat) if last else []
            engine.count(buffer, last)
            return synchronizations

        def done() -> None:
            if last:
                engine.landed(self._unit, self._flat)
                waiting, self._waiting = self._waiting, []
                for future, buffer, slots in waiting:
                    for slot, values in zip(slots, torch.split(buffer, [slot.numel for slot in slots]), strict=True):
                        values.copy_(self._flat[slot.offset : slot.stop])
                    wire.keep(future, buffer)

        wire.submit(begin, done, engine.ended if last else None)
        return future


@dataclass(frozen=True)
class _Hook:
    """What DDP calls.

    An error in a future would come out of ``backward`` as a RuntimeError of DDP's own, and leave DDP in the middle of
    its step. So the futures bring no errors; a callback at the end of ``backward`` does.
    """

    wire: Wire
    buckets: _Buckets | _WholeModel
    finds_unused: bool

    def on_bucket(self, bucket: GradBucket) -> TensorFuture:
        """Queues a bucket."""
        future = self.buckets.on_bucket(bucket)
        if bucket.is_last():
            _queue_callback(lambda: self._before_ddp(future))
        return future

    def _before_ddp(self, future: TensorFuture) -> None:
        if self.finds_unused:  # DDP goes on to wait for a collective of its own, which may fail as well
            self.wire.wait(future)
        _queue_callback(self.wire.check)


_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Has something called when the backward pass under way is through, after what was queued before."""


def _on_bucket(hook: _Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return hook.on_bucket(bucket)


def compress(
    model: DistributedDataParallel,
    method: str | Method,
    *,
    granularity: str | None = None,
    route: str | None = None,
    memory: str | Memory | None = None,
    owner: str | Codec | None = None,
    dense: DensePolicy | None = None,
    seed: int = 0,
    fuse_bytes: int = FUSE_BYTES,
    verify: bool = False,
    verify_every: int = VERIFY_EVERY,
    **options: Any,
) -> Handle:
    """Averages a DDP model's gradients through a compression method from now on.

    To be called on every rank, with the same arguments, before the first backward pass.

    When a worker ends, stops or fails, ``backward`` raises a :class:`gradwire.WireError` on all others, at the latest
    after the process group's timeout; what a method raises comes out of ``backward`` as it is.

    Args:
        model: The wrapped model; float32, float16 or bfloat16 parameters.
        method: A name of ``gradwire.methods.names()`` or a method object.
        granularity: ``"layer"``, ``"bucket"``, ``"model"`` or ``"block:N"``; the method's own if None.
        route: ``"allreduce"``, ``"gather"`` or ``"sharded"``; the method's own if None.
        memory: ``"none"``, ``"residual"``, ``"momentum"``, ``"dgc"``, ``"ef21"`` or a memory object; the method's own
            if None.
        owner: What the average is compressed with on the sharded route, and put through on the gather route: a name
            such as ``"qsgd:8"`` or a codec; if None, the workers' own on the sharded route and nothing on gather.
        dense: Which tensors are averaged densely; by default 1-D tensors and those below 1,024 elements.
        seed: Where all randomness starts; torch's generators are never touched.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
        verify: Whether payloads carry checksums, all but those of all-reduces, whose sums cannot; one that does not
            fit raises :class:`gradwire.PayloadError`. It also compares the averages of all ranks from time to time; a
            difference raises :class:`gradwire.DivergenceError` on every rank, one step later.
        verify_every: Steps from one such comparison to the next.
        **options: The method's hyper-parameters.

    Returns:
        A handle with counters and state.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; the model stays as it was.

    Example:
        >>> model = DistributedDataParallel(net)                               # doctest: +SKIP
        >>> handle = gradwire.compress(model, "acpsgd", rank=4)                # doctest: +SKIP
    """
    configuration = Configuration.make(method, options, granularity, route, memory, owner, dense, seed, fuse_bytes)
    every = checked_verification(verify, verify_every)
    _check_model(model)
    parameters = [(name, each) for name, each in model.module.named_parameters() if each.requires_grad]
    handle = Handle(configuration, parameters, model.process_group, every)
    whole = configuration.granularity.scope == "model"
    buckets = _WholeModel(handle, parameters) if whole else _Buckets(handle, parameters)
    model.register_comm_hook(_Hook(handle.wire, buckets, model.find_unused_parameters), _on_bucket)
    return handle


def _check_model(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}; wrap it in torch.nn.parallel.DistributedDataParallel, "
            "or use gradwire.Synchronizer in your own loop"
        )
    if model.mixed_precision is not None:
        raise ConfigurationError(
            "DDP's mixed_precision occupies the communication hook; build DDP without it and use torch.autocast"
        )
    if model._comm_hooks:
        hook = model._comm_hooks[0][0].__qualname__
        raise ConfigurationError(f"the model has the communication hook {hook!r} already; DDP takes one; wrap it anew")
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ConfigurationError(f"{name or 'the model'} has sparse=True; gradwire averages dense gradients only")
    begun = any(parameter.grad is not None for parameter in model.parameters())
    forwards = model._get_ddp_logging_data().get("iteration", 0)  # type: ignore[no-untyped-call]
    if begun or int(forwards) > 0:
        raise ConfigurationError(
            "the model has run a backward pass already; call gradwire.compress right after DDP(...)"
        )
