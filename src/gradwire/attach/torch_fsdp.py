"""What FSDP2 keeps to itself: all that is read and changed of ``torch.distributed.fsdp``'s insides is in this file.

FSDP2 gathers and reduces the parameters of a ``fully_shard`` or ``replicate`` call together, in *groups*. A group whose
mesh has a dimension of replicas all-reduces over it before it calls any hook. So that the average can be another, its
mesh is taken for one without replicas here. Its parameters never ask the group: they stay DTensors over the whole mesh.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.attach.wrappers import parameters_of
from gradwire.errors import ConfigurationError
from gradwire.wire.transport import described, failing, timeout_of

TRIED = "2.11 to 2.15"
"""Versions of torch that have all this."""

Parameters = Sequence[tuple[str, nn.Parameter]]


class ParameterGroup:
    """Parameters whose gradients FSDP reduces together.

    Args:
        inner: FSDP's own.
        name: A parameter of it, for messages.

    Attributes:
        partial: What passes that do not average have left, as FSDP keeps it for meshes of two dimensions.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name
        self._members = [each for each in inner.fsdp_params if each.sharded_param.requires_grad]
        self._numel = sum(each.padded_sharded_param_size.numel() for each in self._members)
        self._copies = 1 if self.replicas is None else self.replicas.size()
        self.partial: Tensor | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that required gradients at first, as DTensors."""
        return [each.sharded_param for each in self._members]

    @property
    def places(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Shape of each one's part, and where it starts in the reduced gradient: parts are as long as the first is."""
        offset = 0
        for each in self._members:
            yield tuple(each.sharded_size), offset
            offset += each.padded_sharded_param_size.numel()

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group's own workers over which it is replicated, if its mesh has any."""
        group: dist.ProcessGroup | None = getattr(self._inner.mesh_info, "replicate_process_group", None)
        return group

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The workers over which its parameters are cut, if they are."""
        group: dist.ProcessGroup | None = getattr(self._inner.mesh_info, "shard_process_group", None)
        return group

    @property
    def factors(self) -> tuple[float, float]:
        """What means over shards, and over replicas, are multiplied by: ``set_gradient_divide_factor`` has sums."""
        divisor = self._inner.gradient_divide_factor
        sharded = 1 if self.shards is None else self.shards.size()
        return (1.0, 1.0) if divisor is None else (sharded / divisor, float(self._copies))

    @property
    def averages(self) -> bool:
        """Whether this pass ends with an average, as ``set_requires_all_reduce`` has it."""
        return bool(self._inner.all_reduce_grads)

    def attach(self, hook: Callable[[Tensor], None]) -> None:
        """Has a hook called with every reduced gradient, in place of the average over replicas."""
        inner, old = self._inner, self._inner.mesh_info
        inner._all_reduce_hook = hook
        if self.replicas is None:
            return
        from torch.distributed.fsdp._fully_shard import _fsdp_common as common

        new = copy.copy(old)
        new.__class__ = common.FSDPMeshInfo if isinstance(old, common.FSDPMeshInfo) else common.DataParallelMeshInfo
        if inner.post_forward_mesh_info is old:
            inner.post_forward_mesh_info = new
        inner.mesh_info = new

    @property
    def padded(self) -> list[tuple[int, ...]]:
        """Shape of each one's part as it is sent, as long as the first is, whichever rank holds it."""
        return [tuple(each.padded_sharded_param_size) for each in self._members]

    def scatter_by(self, scatter: Callable[[Tensor, Tensor], None]) -> None:
        """Has something called with every unsharded gradient, and where this rank's part of the average is to be."""
        from torch.distributed.fsdp._fully_shard import _fsdp_api as api

        class Scatter(api.ReduceScatter):
            def allocate(
                self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
            ) -> Tensor:
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(
                self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
            ) -> None:
                scatter(input_tensor, output_tensor)

        self._inner._reduce_scatter_comm = Scatter()

    def check_unhooked(self) -> None:
        """Raises ConfigurationError if something else averages over its replicas already."""
        if self._inner._all_reduce_hook is not None:
            raise ConfigurationError(
                f"the parameter group of {self._name!r} has an all-reduce hook already, of gradwire.compress or "
                "set_all_reduce_hook; FSDP takes one; shard the model anew"
            )

    def check_unscattered(self) -> None:
        """Raises ConfigurationError if something else reduces over its shards already."""
        if type(self._inner._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            raise ConfigurationError(
                f"the parameter group of {self._name!r} has a reduce-scatter of its own already; FSDP takes one; shard "
                "the model anew"
            )

    def check_free(self) -> None:
        """Raises ConfigurationError if gradients have come already."""
        waiting = [getattr(each, "unsharded_accumulated_grad", None) for each in self._members]  # gone in 2.15
        begun = [self._inner._partial_reduce_output, *waiting]
        if any(each is not None for each in (*begun, *(each.grad for each in self.parameters))):
            raise ConfigurationError(
                "the model has run a backward pass already; call gradwire.compress right after fully_shard(...), or "
                "after zero_grad()"
            )

    def check_policy(self) -> None:
        """Raises ConfigurationError if what FSDP does to the gradient does not go with an average of our own."""
        inner = self._inner
        if any(each.offload_to_cpu for each in self._members) and inner.device.type != "cpu":
            raise ConfigurationError(
                "the model's offload_policy moves gradients to the CPU before they are averaged; fully_shard it without"
            )
        if inner.force_sum_reduction_for_comms:
            raise ConfigurationError(
                f"the parameter group of {self._name!r} divides gradients after they were summed, and gradwire "
                "averages before; leave out set_force_sum_reduction_for_comms"
            )
        kinds = set()
        for each in self._members:
            policy = each.mp_policy  # the group's before 2.15, too
            kinds.add((each.sharded_param.dtype, policy.param_dtype, policy.reduce_dtype))
            dtype = policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype
            if len(kinds) > 1:
                raise ConfigurationError(
                    f"the parameter group of {self._name!r} has parameters of several dtypes, whose gradients FSDP "
                    "packs in an order of its own; fully_shard those of each dtype by themselves"
                )
            if dtype not in (torch.float32, torch.bfloat16):
                raise ConfigurationError(
                    f"the parameter group of {self._name!r} reduces in {str(dtype).removeprefix('torch.')}, which FSDP "
                    "divides after the average; choose MixedPrecisionPolicy(reduce_dtype=torch.float32), or "
                    "torch.bfloat16"
                )

    def check_gradient(self, gradient: Tensor) -> None:
        """Raises ConfigurationError unless gradients of all parameters came, and nobody takes them too early."""
        for each in self.parameters:
            if getattr(each, "_post_accumulate_grad_hooks", None):
                raise ConfigurationError(
                    f"a parameter in the group of {self._name!r} has a post-accumulate-grad hook, which FSDP calls "
                    "before the average has come; step the optimizer after backward"
                )
        self.check_whole(gradient.numel())

    def check_whole(self, numel: int) -> None:
        """Raises ConfigurationError unless a gradient has all elements of what this rank holds."""
        if numel != self._numel:
            raise ConfigurationError(
                f"{numel} of the {self._numel} elements of the gradient came in the parameter group of "
                f"{self._name!r}: some of its parameters took no part in the loss, or were frozen since the method was "
                f"attached; {_remedy_for_unused()}, or shard the model and attach anew"
            )


class _Telling:
    """Put before the class of a collective of FSDP's, so that what fails there says what it was.

    Attributes:
        name: What it does.
    """

    name: str

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **more: Any) -> Any:
        operation = described(self.name, max(output_tensor, input_tensor, key=Tensor.numel), group.size())
        with failing(operation, time.monotonic(), timeout_of(group)):
            call = super().__call__  # type: ignore[misc]
            return call(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **more)


def _telling(collective: Any, name: str) -> Any:
    """The same one, still of its class, which FSDP asks for."""
    if isinstance(collective, _Telling):
        return collective
    kind = type(collective)
    told: Any = object.__new__(type(kind.__name__, (_Telling, kind), {"name": name}))
    vars(told).update(vars(collective))
    return told


class ShardedModel:
    """A model that went through ``fully_shard`` or ``replicate``, as far as averages need it.

    Args:
        model: The outermost module that did.

    Attributes:
        parameters: What requires gradients, by name.
        frozen: What does not.

    Raises:
        ConfigurationError: If this torch's FSDP2 is another inside, or the model cannot be attached to.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(each): name for name, each in parameters_of(model)}
        try:
            self._states = list(dict.fromkeys(each._get_fsdp_state() for each in _sharded_modules(model)))
            self._inner = inner = [each for state in self._states for each in _groups_of(state)]
            self._roots = [state._root_post_backward_final_callback for state in self._states]
            self.groups = [
                ParameterGroup(each, names[id(each.fsdp_params[0].sharded_param)])
                for each in inner
                if any(own.sharded_param.requires_grad for own in each.fsdp_params)
            ]
            for each in self.groups:
                each.check_free()
                each.check_policy()
                list(each.places)
        except AttributeError as error:
            raise ConfigurationError(
                f"FSDP2 of torch {torch.__version__} is another inside than gradwire knows it ({error}); it goes with "
                f"torch {TRIED}"
            ) from error
        managed = {id(each) for group in self.groups for each in group.parameters}
        self.parameters = [(name, each) for name, each in parameters_of(model) if id(each) in managed]
        self.frozen = [(name, each) for name, each in parameters_of(model) if not each.requires_grad]
        self.names = {id(each): name for name, each in self.parameters}

    def replicas(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The workers that hold the same shards, as found; or as given, where there is no mesh of them.

        Raises:
            ConfigurationError: If there are none, or others than were given; or something averages over them already.
        """
        for each in self.groups:
            each.check_unhooked()
        return _replicas(self.groups, given)

    def shards(self) -> dist.ProcessGroup:
        """The workers over which the model is cut.

        Raises:
            ConfigurationError: If there are none, or not the same for all parameters; or something reduces over them
                already.
        """
        for each in self.groups:
            each.check_unscattered()
        groups = [each.shards for each in self.groups]
        found = {tuple(dist.get_process_group_ranks(each)): each for each in groups if each is not None}
        if len(found) != 1 or None in groups:
            listed = ", ".join(map(str, sorted(found))) or "none"
            raise ConfigurationError(
                f"the model's parameters are cut over ranks {listed}; fully_shard all of it on one mesh with a "
                "dimension of shards"
            )
        return next(iter(found.values()))

    def fail_as_the_wire_does(self) -> None:
        """Has what FSDP gathers and reduces over the shards end with a WireError where a worker is gone."""
        for inner in self._inner:
            inner._all_gather_comm = _telling(inner._all_gather_comm, "FSDP's all-gather")
            inner._reduce_scatter_comm = _telling(inner._reduce_scatter_comm, "FSDP's reduce-scatter")

    def check_outermost(self) -> None:
        """Raises ConfigurationError if the model has become a part of a larger one that FSDP runs."""
        others = [each for state in self._states for each in state._state_ctx.all_states if each not in self._states]
        if others:
            raise ConfigurationError(
                "the model was sharded further after gradwire.compress; call it on the outermost module, when all of "
                "it went through fully_shard"
            )

    def at_end_of_backward(self, end: Callable[[], None]) -> None:
        """Has something called at the end of every backward pass, when FSDP has handed all gradients on."""
        for state, final in zip(self._states, self._roots, strict=True):
            state._root_post_backward_final_callback = _one_after_other(final, end)


def _replicas(groups: Sequence[ParameterGroup], given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The workers to average over, as the groups' meshes have them, or as given."""
    meshes = [each.replicas for each in groups]
    own = {None if each is None else tuple(dist.get_process_group_ranks(each)): each for each in meshes}
    if len(own) > 1:
        listed = " and ".join(sorted("none" if ranks is None else str(ranks) for ranks in own))
        raise ConfigurationError(f"the model's parameters have replicas on different ranks, {listed}; use one mesh")
    ((ranks, found),) = own.items() if own else ((None, None),)
    if found is None and given is None:
        raise ConfigurationError(
            "the model is sharded over all its ranks, so no average over replicas is sent that could be compressed; "
            "fully_shard it on a mesh of two dimensions, replicas first, or give process_group, the ranks that hold "
            "the same shards"
        )
    if found is not None and given is not None and tuple(dist.get_process_group_ranks(given)) != ranks:
        raise ConfigurationError(
            f"process_group has ranks {tuple(dist.get_process_group_ranks(given))}, and the mesh that the model was "
            f"sharded on has its replicas on {ranks}; leave process_group out"
        )
    return found or given  # type: ignore[return-value]


def _remedy_for_unused() -> str:
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return "call model.set_reduce_scatter_unused_params(True)"
    return f"fully_shard these by themselves, or take a newer torch than {torch.__version__}, which knows a way"


def _one_after_other(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def went_through_fsdp(model: nn.Module) -> bool:
    """Whether ``fully_shard`` or ``replicate`` made a module theirs.

    Raises:
        ConfigurationError: If that happened to parts of it only, or the first FSDP did.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second, and whoever sharded a model did
    if fsdp is None:
        return False
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise ConfigurationError(
                f"{name or 'the model'} is a FullyShardedDataParallel, which is FSDP1; shard the model by "
                "torch.distributed.fsdp.fully_shard, which is FSDP2, on a mesh with a dimension of replicas"
            )
        if isinstance(module, fsdp.FSDPModule) and not isinstance(model, fsdp.FSDPModule):
            raise ConfigurationError(
                f"{name!r} went through fully_shard and the model around it did not; call fully_shard(model), too, "
                "after its parts, then gradwire.compress(model)"
            )
    return isinstance(model, fsdp.FSDPModule)


def _groups_of(state: Any) -> list[Any]:
    """What a ``fully_shard`` call's parameters are reduced in: several groups from 2.13 on, one at most before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _sharded_modules(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [each for each in model.modules() if isinstance(each, FSDPModule)]
