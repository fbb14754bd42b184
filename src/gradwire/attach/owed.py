"""What compression owes to a model, for a run that goes on with the model cut in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.handle import Handle
from gradwire.attach.shards import is_sharded, local
from gradwire.attach.wrappers import unwrapped_model
from gradwire.engine.change import owed_of
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory import OWED, Kind


class Owed:
    """What is owed to each parameter, placed as the parameter is: a ``Stateful`` that reshards as the model does.

    A handle's own state belongs to one cut of the model. What was not sent does not: it is a mean over the workers that
    hold the same part, and so a tensor like the parameter. The first step after loading takes it along with its
    gradient, whatever method, cut and number of workers there are then; factors and all else begin anew. To be used on
    every rank between two steps; saving waits for the other workers.

    Args:
        handle: What :func:`gradwire.compress` returned, or a :class:`gradwire.Synchronizer`.
        model: Its model.

    Example:
        >>> _ = dcp.save({"model": model, "owed": gradwire.Owed(handle, model)}, checkpoint_id=path)
        >>> dcp.load({"model": model, "owed": gradwire.Owed(handle, model)}, checkpoint_id=path)
    """

    def __init__(self, handle: Handle, model: nn.Module) -> None:
        self._handle = handle
        inner = unwrapped_model(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        self._parameters = {name: each for name, each in inner.named_parameters() if name in handle.averaged.shapes}
        for name in handle.averaged.shapes.keys() - self._parameters.keys():
            raise ConfigurationError(f"the model has no parameter {name!r}; give the one that was attached to")

    def state_dict(self) -> dict[str, Tensor]:
        """The mean of what workers owe, by parameter name: ``float32``, a DTensor where the parameter is one."""
        return self._handle.wire.call(self._means)

    def _means(self) -> dict[str, Tensor]:
        handle, engine = self._handle, self._handle.engine
        handle._check_between_steps()
        means: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            shape, rule = handle.averaged.shapes[name], handle.configuration.rule(name)
            owed = owed_of(engine.store, Slot(name, shape, 0), rule, engine.rank, engine.world_size, engine.nodes)
            mean = torch.zeros(shape, dtype=torch.float32, device=engine.store.device) if owed is None else owed
            handle._transport.all_reduce(mean, dist.ReduceOp.SUM)()
            means[name] = _placed_as(mean.div_(engine.world_size), parameter)
        return means

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Owes what :meth:`state_dict` returned, in place of all that the handle remembered.

        Raises:
            ConfigurationError: If a parameter's is missing or has another shape; nothing is changed.
        """
        for name, parameter in self._parameters.items():
            if not isinstance(state.get(name), Tensor) or state[name].shape != parameter.shape:
                raise ConfigurationError(f"the state has nothing owed to {name!r} of shape {tuple(parameter.shape)}")
        self._handle.wire.call(lambda: self._owe(state))

    def _owe(self, state: Mapping[str, Any]) -> None:
        self._handle._check_between_steps()
        store = self._handle.engine.store
        store.load({}, {})
        for name in self._parameters:
            store.put(OWED, name, local(state[name]).to(store.device, torch.float32, copy=True), Kind.MEAN)


def _placed_as(mean: Tensor, parameter: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return mean
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(mean, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
