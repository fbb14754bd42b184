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
from gradwire.attach.wrappers import parameters_of, unwrapped_model
from gradwire.engine.change import begun_at, estimate_of, owed_of
from gradwire.engine.guards.learning_rate import RATE
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.layout import Slot
from gradwire.memory import OWED, Kind

ESTIMATED = "which are estimates"
"""The state's key, which no parameter has for a name, that says what its tensors are."""

RATES = "weighed at rates"
"""The state's key that says at which learning rate each was weighed last; 0 where at none."""


class Owed:
    """What is owed to each parameter, placed as the parameter is: a ``Stateful`` that reshards as the model does.

    A handle's own state belongs to one cut of the model. What was not sent does not: it is a mean over the workers that
    hold the same part, and so a tensor like the parameter. The first step after loading takes it along with its
    gradient, whatever method, cut and number of workers there are then; factors and all else begin anew. With
    ``learning_rate`` on both sides it is weighed by the old rate over that of this step.

    Memories of differences, EF21's and DIANA's, owe nothing. Of their parameters it is what all workers know of the
    mean gradient; after loading, every worker's own estimate is that one too, so that all know the mean of the
    workers' estimates, as they must. A handle with another memory has no use for it.

    To be used on every rank between two steps; saving waits for the other workers.

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
        self._parameters = {name: each for name, each in parameters_of(inner) if name in handle.averaged.shapes}
        for name in handle.averaged.shapes.keys() - self._parameters.keys():
            raise ConfigurationError(f"the model has no parameter {name!r}; give the one that was attached to")

    def state_dict(self) -> dict[str, Tensor]:
        """The mean of what workers owe, or what they know of the mean, by parameter name; which of them it is; rates.

        ``float32``, a DTensor where the parameter is one; the last two ``bool[parameters]``, ``float64[parameters]``.

        Raises:
            GradwireError: If a step is under way; or if what was loaded is still to be taken along by a step, and the
                memory is one of differences.
        """
        return self._handle.wire.call(self._means)

    def _means(self) -> dict[str, Tensor]:
        handle, engine = self._handle, self._handle.engine
        handle._check_between_steps()
        store, nodes = engine.store, engine.nodes
        means: dict[str, Tensor] = {}
        estimated = []
        for name, parameter in self._parameters.items():
            slot, rule = self._slot(name), handle.configuration.rule(name)
            kept = estimate_of(store, slot, rule, engine.rank, nodes)
            estimated.append(kept is not None)
            if kept is None:
                kept = owed_of(store, slot, rule, engine.rank, engine.world_size, nodes)
            elif store.get(OWED, name) is not None:
                raise GradwireError(
                    f"{name!r} is owed what the next step takes along, and memory={rule.memory} has no place for it; "
                    "save after that step"
                )
            mean = torch.zeros(slot.shape, dtype=torch.float32, device=store.device) if kept is None else kept
            handle._transport.all_reduce(mean, dist.ReduceOp.SUM)()
            means[name] = _placed_as(mean.div_(engine.world_size), parameter)
        kept_rates = [store.get(RATE, name) for name in self._parameters]
        rates = [0.0 if each is None else float(each) for each in kept_rates]
        return {**means, ESTIMATED: torch.tensor(estimated), RATES: torch.tensor(rates, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Owes what :meth:`state_dict` returned, or begins at it, in place of all that the handle remembered.

        Raises:
            ConfigurationError: If a parameter's is missing or has another shape; nothing is changed.
        """
        for name, parameter in self._parameters.items():
            if not isinstance(state.get(name), Tensor) or state[name].shape != parameter.shape:
                raise ConfigurationError(f"the state has nothing owed to {name!r} of shape {tuple(parameter.shape)}")
        for key in (ESTIMATED, RATES):
            each = state.get(key)
            if not isinstance(each, Tensor) or each.shape != (len(self._parameters),):
                raise ConfigurationError(f"the state does not say {key!r}; load what Owed.state_dict() returned")
        self._handle.wire.call(lambda: self._owe(state, state[ESTIMATED].tolist(), state[RATES].tolist()))

    def _owe(self, state: Mapping[str, Any], estimated: list[bool], rates: list[float]) -> None:
        handle, engine = self._handle, self._handle.engine
        handle._check_between_steps()
        tensors: dict[str, dict[str, Tensor]] = {OWED: {}, RATE: {}}
        kinds = {OWED: Kind.MEAN, RATE: Kind.SHARED}
        if handle._guarding.choices.learning_rate is not None:
            known = {name: rate for name, rate in zip(self._parameters, rates, strict=True) if rate}
            tensors[RATE] = {name: torch.tensor(rate, dtype=torch.float64) for name, rate in known.items()}
        for name, is_estimate in zip(self._parameters, estimated, strict=True):
            value = local(state[name]).to(torch.float32)
            if not is_estimate:
                tensors[OWED][name] = value
                continue
            begun = begun_at(value, self._slot(name), handle.configuration.rule(name), engine.rank, engine.nodes)
            for field, (kept, kind) in begun.items():
                tensors.setdefault(field, {})[name] = kept
                kinds[field] = kind
        engine.store.load(tensors, kinds)

    def _slot(self, name: str) -> Slot:
        return Slot(name, self._handle.averaged.shapes[name], 0)


def _placed_as(mean: Tensor, parameter: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return mean
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(mean, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
