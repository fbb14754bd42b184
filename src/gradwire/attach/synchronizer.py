"""The way in for plain parameters: call it between backward and optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.apart import take_apart
from gradwire.attach.buckets import Bucketed
from gradwire.attach.given import Named, check_left_out, check_named
from gradwire.attach.shards import local, placed_as
from gradwire.attach.tree import Tree
from gradwire.attach.twice import averaged, check_not_averaged
from gradwire.attach.uncleared import Uncleared
from gradwire.attach.wrappers import unwrapped_model
from gradwire.codecs.codec import Codec
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.guards import Unused
from gradwire.engine.guards.loss_scale import check_scaled
from gradwire.engine.mixture import Methods
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError
from gradwire.memory import Memory
from gradwire.policy import DensePolicy
from gradwire.surroundings import as_on_the_wire

_log = logging.getLogger("gradwire")

Tensors = Mapping[str, Tensor]
"""Tensors by the name of the parameter that they are shaped as."""


class Synchronizer(Bucketed):
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
        clip_spikes: See there.
        audit_every: See there.
        verify_every: See there.
        start: See there.
        inside: See there.
        name: See there.
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
    _aloud = True

    @as_on_the_wire()
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
        clip_spikes: float | None = None,
        audit_every: int = 0,
        verify_every: int = 0,
        start: int = 0,
        inside: int | str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        choices = Choices.of(locals())

        def named() -> Named:
            given: object = parameters
            if isinstance(given, torch.nn.Module):
                module = unwrapped_model(given)
                if isinstance(module, DistributedDataParallel):
                    raise ConfigurationError(
                        "the module is a DistributedDataParallel, which averages by itself; give it to "
                        "gradwire.compress, or the module inside, which then must not run through DDP"
                    )
                self._tree = Tree(module)
                given = self._tree.named_parameters()
            checked = check_named(given)
            self._named = [(name, parameter) for name, parameter in checked if parameter.requires_grad]
            self._frozen = [(name, parameter) for name, parameter in checked if not parameter.requires_grad]
            return self._named

        super().__init__(named, method, process_group, choices, options)
        self._unused = Unused(self.engine.give_back, ask=False)
        self.engine.guards.append(self._unused)
        self._uncleared = Uncleared(self.configuration, aloud=self.engine.rank == 0)
        device = self.engine.store.device
        self._flats = [torch.zeros(unit.numel, dtype=torch.float32, device=device) for unit in self._buckets.units]
        self._views = self._buckets.views(self._flats)

    @_disable_dynamo  # torch.compiler.disable would have torch.compile imported here, which takes seconds
    def synchronize(self) -> None:
        """Replaces every parameter's ``grad`` by its average over all workers; a missing one counts as zero.

        A parameter that requires gradients no more counts as zero, too; its ``grad`` is left alone, and what is owed to
        it waits until it does again.

        Raises:
            ConfigurationError: If a gradient is sparse, a parameter was frozen at first and is not now, or the module
                has another one in its place; if ``grad_scaler`` has unscaled gradients already; or if another
                ``Synchronizer`` has just averaged them over the same workers, or :func:`gradwire.compress` has. No
                gradient is changed.
            WireError: If a collective fails, because a worker ended, stopped or failed, or takes longer than the
                process group's timeout. An error of the method's own is raised as it is.
            GradwireError: If an earlier step failed.
        """
        check_left_out(self._frozen)
        check_scaled(self._guarding.choices.grad_scaler)
        if self._tree is not None:
            self._tree.check()
        for _, each in self._named:
            if each.grad is not None and each.requires_grad:
                each.grad = placed_as(each.grad, each)
        take_apart(each for _, each in self._named)
        gradients = {name: each.grad for name, each in self._named if each.grad is not None and each.requires_grad}
        # Made here, for the stream of the caller, who will free them.
        with torch.inference_mode(False):  # or nobody could write to them outside of it
            missing = {
                each: torch.empty_like(each, dtype=each.grad_dtype or each.dtype)
                for _, each in self._named
                if each.grad is None and each.requires_grad
            }
        if not gradients and self._tree is None and self._aloud:
            self._aloud = False
            _log.warning(
                "no parameter that was given has a gradient, so all count as zero here; that is right where this rank "
                "had nothing to train on, but where others took the parameters' places since, as fully_shard and "
                "load_state_dict(assign=True) have them do, attach anew"
            )
        check_dense(gradients)
        check_not_averaged(self, self._named, gradients)
        self._uncleared.check(gradients)
        self._unused.names = {name for name, each in self._named if not each.requires_grad}
        parameters = dict(self._named)
        self._buckets.average(
            self._flats,
            self._views,
            {name: local(each) for name, each in gradients.items()},
            lambda name, average: _take_for_gradient(missing, parameters[name], average),
        )
        averaged(self, gradients.values())
        self._uncleared.averaged({name: each.grad for name, each in self._named if each.grad is not None})

    @_disable_dynamo
    def average(self, tensors: Tensors) -> dict[str, Tensor]:
        """Averages other tensors than gradients over all workers, and leaves them as they are.

        To a method and its memory they are what gradients are otherwise, so use one handle for one kind of tensor.

        Args:
            tensors: Shaped as the parameters, by their names; a missing one counts as zero.

        Returns:
            The averages of all parameters' tensors, ``float32``, in room that the next average overwrites.

        Raises:
            ConfigurationError: If something is no tensor, or sparse, or has no parameter of its name and shape; nothing
                is changed.
            WireError: As :meth:`synchronize`.
            GradwireError: If an earlier step failed.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise ConfigurationError(f"what was given for {name!r} is a {type(tensor).__name__}; give a tensor")
            if self.averaged.shapes.get(name) != tuple(local(tensor).shape):
                raise ConfigurationError(
                    f"the tensor for {name!r} has shape {tuple(local(tensor).shape)}; the parameter of that name has "
                    f"{self.averaged.shapes.get(name, 'never been given')}; give tensors shaped as the parameters"
                )
        check_dense(tensors)
        self._buckets.average(self._flats, self._views, {name: local(each) for name, each in tensors.items()})
        return {name: view for views in self._views for name, view in views.items()}


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
