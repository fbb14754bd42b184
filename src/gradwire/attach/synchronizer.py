"""The way in for plain parameters: call it between backward and optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradwire.attach.given import Named, check_left_out, default_group
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.attach.shards import local, part_of, placed_as
from gradwire.attach.tree import Tree
from gradwire.attach.wrappers import unwrapped_model
from gradwire.codecs.codec import Codec
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import Methods, configure
from gradwire.engine.policy import DensePolicy
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.memory import Memory
from gradwire.wire.wire import TensorFuture

BUCKET_ELEMENTS = 25 * 2**20 // 4
"""DDP's bucket size, in float32 elements."""

Tensors = Mapping[str, Tensor]
"""Tensors by the name of the parameter that they are shaped as."""


class Synchronizer(Handle):
    """Averages the gradients of plain parameters, without DDP.

    To be made on every rank with the same arguments.

    Args:
        parameters: A module; or names and parameters, as ``net.named_parameters()`` gives them. Those that require no
            gradient are left out. A parameter that takes another's place in the module later is noticed, and refused in
            :meth:`synchronize`; with names and parameters it cannot be, and its gradient would be left out.
        method: As in :func:`gradwire.compress`.
        process_group: The workers, also as a device mesh of one dimension; all of them if None.
        granularity: As in :func:`gradwire.compress`; and so are the other arguments.
        route: See there.
        memory: See there.
        owner: See there.
        dense: See there.
        seed: See there.
        fuse_bytes: See there.
        grad_scaler: See there.
        rollback: See there.
        learning_rate: See there.
        audit_every: See there.
        verify_every: See there.
        start: See there.
        **options: The method's hyper-parameters.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.

    Example:
        >>> sync = gradwire.Synchronizer(net, "topk", ratio=0.01)
        >>> loss.backward(); sync.synchronize(); optimizer.step()

        A method for each pattern of names, after 100 dense steps:

        >>> sync = gradwire.Synchronizer(net, {"0.*": "topk:ratio=0.01", "*": "acpsgd:rank=4"}, start=100)
    """

    _tree: Tree | None = None

    def __init__(
        self,
        parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]],
        method: Methods = RECIPE,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        granularity: str | None = None,
        route: str | None = None,
        memory: str | Memory | None = None,
        owner: str | Codec | None = None,
        dense: DensePolicy | None = None,
        seed: int = 0,
        fuse_bytes: int = FUSE_BYTES,
        grad_scaler: torch.amp.GradScaler | None = None,
        rollback: bool | None = None,
        learning_rate: Callable[[], float] | None = None,
        audit_every: int = 0,
        verify_every: int = 0,
        start: int = 0,
        **options: Any,
    ) -> None:
        choices = Choices.of(locals())
        workers = default_group(process_group)
        with RollCall(workers) as roll_call:
            configuration, guarding = configure(method, options, choices), Guarding(choices)
            if isinstance(parameters, torch.nn.Module):
                self._tree = Tree(unwrapped_model(parameters))
                parameters = self._tree.named_parameters()
            given = list(parameters)
            self._named = named = [(name, parameter) for name, parameter in given if parameter.requires_grad]
            self._frozen = [(name, parameter) for name, parameter in given if not parameter.requires_grad]
            super().__init__(configuration, named, workers, roll_call, guarding)
        self._buckets = [_Bucket(self, bucket) for bucket in _in_buckets(named, configuration.whole)]

    def synchronize(self) -> None:
        """Replaces every parameter's ``grad`` by its average over all workers; a missing one counts as zero.

        A parameter that requires gradients no more counts as zero, too, and its ``grad`` is left alone.

        Raises:
            ConfigurationError: If a gradient is sparse, a parameter was frozen at first and is not now, or the module
                has another one in its place; no gradient is changed.
            WireError: If a collective fails, because a worker ended, stopped or failed, or takes longer than the
                process group's timeout. An error of the method's own is raised as it is.
            GradwireError: If an earlier step failed.
        """
        check_left_out(self._frozen)
        if self._tree is not None:
            self._tree.check()
        gradients = {}
        for name, each in self._named:
            if each.grad is not None and each.requires_grad:
                each.grad = gradients[name] = placed_as(each.grad, each)
        # Made here, for the stream of the caller, who will free them.
        missing = {each: torch.empty_like(each) for _, each in self._named if each.grad is None and each.requires_grad}
        self._average(gradients, partial(_take_for_gradient, missing))

    def average(self, tensors: Tensors) -> dict[str, Tensor]:
        """Averages other tensors than gradients over all workers, and leaves them as they are.

        To a method and its memory they are what gradients are otherwise, so use one handle for one kind of tensor.

        Args:
            tensors: Shaped as the parameters, by their names; a missing one counts as zero.

        Returns:
            The averages of all parameters' tensors, ``float32``, in room that the next average overwrites.

        Raises:
            ConfigurationError: If a tensor is sparse, or has no parameter of its name and shape; nothing is changed.
            WireError: As :meth:`synchronize`.
            GradwireError: If an earlier step failed.
        """
        for name, tensor in tensors.items():
            if self._shapes.get(name) != tuple(local(tensor).shape):
                raise ConfigurationError(
                    f"the tensor for {name!r} has shape {tuple(local(tensor).shape)}; the parameter of that name has "
                    f"{self._shapes.get(name, 'never been given')}; give tensors shaped as the parameters"
                )
        self._average(tensors, _leave)
        return {name: view for bucket in self._buckets for name, view in bucket.views.items()}

    def _average(self, tensors: Tensors, take: Callable[[torch.nn.Parameter, Tensor], None]) -> None:
        """Averages in all buckets, and calls ``take`` on the wire's thread with each parameter and average."""
        check_dense(tensors)
        self.engine.before_step()
        last = self._buckets[-1]
        with self.wire.whole():
            for future in [bucket.submit(tensors, take, bucket is last) for bucket in self._buckets]:
                self.wire.wait(future)


class _Bucket:
    """Some parameters and the flat buffer that is averaged for them."""

    def __init__(self, handle: Handle, parameters: Named) -> None:
        self._handle = handle
        self._parameters = parameters
        slots = flat_slots([(name, handle._shapes[name]) for name, _ in parameters])
        slots = tuple(
            replace(slot, part=part_of(each).get("part", "")) for slot, (_, each) in zip(slots, parameters, strict=True)
        )
        self._unit = handle.engine.unit(slots)
        self._flat = torch.zeros(self._unit.numel, dtype=torch.float32, device=parameters[0][1].device)
        self.views = {slot.name: self._flat[slot.offset : slot.stop].view(slot.shape) for slot in slots}

    def submit(self, tensors: Tensors, take: Callable[[torch.nn.Parameter, Tensor], None], last: bool) -> TensorFuture:
        wire, engine = self._handle.wire, self._handle.engine
        future = wire.promise()

        def fill() -> None:
            for name, view in self.views.items():
                if name in tensors:
                    view.copy_(local(tensors[name]))
                else:
                    view.zero_()

        def hand_on() -> None:
            for name, parameter in self._parameters:
                take(parameter, self.views[name])
            wire.keep(future, self._flat)

        engine.average(wire, lambda: self._unit, self._flat, fill=fill, hand_on=hand_on, counted=self._flat, last=last)
        return future


def check_dense(tensors: Tensors) -> None:
    """Raises ConfigurationError if a gradient, or what is averaged in its place, is sparse."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ConfigurationError(
                f"the gradient of {name!r} has layout {tensor.layout}; gradwire averages dense ones only"
            )


def _take_for_gradient(
    missing: Mapping[torch.nn.Parameter, Tensor], parameter: torch.nn.Parameter, average: Tensor
) -> None:
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = missing[parameter]
    local(parameter.grad).copy_(average)


def _leave(parameter: torch.nn.Parameter, average: Tensor) -> None:
    """The average stays where it is."""


def _in_buckets(parameters: Named, whole: bool) -> list[Named]:
    """Parameters in buckets of DDP's size, last ones first, as their gradients come; one bucket for a whole model."""
    if whole:
        return [parameters]
    buckets: list[list[tuple[str, torch.nn.Parameter]]] = [[]]
    filled = 0
    for name, parameter in reversed(parameters):
        if filled >= BUCKET_ELEMENTS:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += local(parameter).numel()
    return list(buckets)
