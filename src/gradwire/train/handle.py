"""What an attachment gives back: counters, state, and a description of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigurationError
from gradwire.train.agreement import check_agreement
from gradwire.train.configuration import Configuration
from gradwire.train.engine import Engine
from gradwire.train.guards import Digest
from gradwire.train.together import rehearse
from gradwire.wire import CheckedTransport, Line, ProcessGroupTransport, Stats, Wire
from gradwire.wire.transport import timeout_of

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

VERIFY_EVERY = 100
"""Steps from one comparison of all ranks' averages to the next, where that is asked for."""

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Handle:
    """An attached method.

    Args:
        configuration: All choices.
        parameters: Names and parameters whose gradients are averaged, in the model's order.
        group: The workers; the handle makes a group of its own from the same ranks, so that its collectives cannot
            mix with others'.
        verify_every: Steps from one comparison of the averages over all ranks to the next, with checksums on all
            payloads; 0 for neither.
    """

    _attached = False

    def __init__(
        self, configuration: Configuration, parameters: Named, group: dist.ProcessGroup, verify_every: int = 0
    ) -> None:
        check_parameters(parameters)
        device = parameters[0][1].device
        if device.type == "cpu":
            rehearse(configuration)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._group = _sibling(group, device)
        transport = ProcessGroupTransport(self._group)
        check_agreement(configuration, parameters, transport, device, {"verify_every": str(verify_every)})
        self.configuration = configuration
        self.engine = Engine(configuration, transport.rank, transport.world_size, device)
        line: Line = transport
        if verify_every:
            line = CheckedTransport(transport, self.engine.meter)
            self.engine.guards.insert(0, Digest(verify_every))
        self.wire = Wire(line, self.engine.meter, configuration.fuse_bytes, device)
        self._attached = True

    def stats(self) -> Stats:
        """Totals of this rank since the method was attached."""
        return self.engine.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on as if it had not stopped: tensors and plain values, by parameter name.

        Every rank has its own; save it on each.
        """
        return {
            "version": 1,
            "configuration": self.configuration.describe(),
            "step": self.engine.step,
            "tensors": self.engine.store.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken.

        Raises:
            ConfigurationError: If the state is of another version, configuration or model; nothing is changed.
        """
        if state.get("version") != 1:
            raise ConfigurationError(f"state version {state.get('version')!r} is not known; this gradwire reads 1")
        for key, ours in self.configuration.describe().items():
            theirs = state["configuration"].get(key)
            if ours != theirs:
                raise ConfigurationError(
                    f"the state was saved with {key}={theirs!r}, this handle has {key}={ours!r}; attach with the same"
                )
        for field, tensors in state["tensors"].items():
            for name in tensors:
                if name not in self._shapes:
                    raise ConfigurationError(f"the state keeps {field} of {name!r}, which this model does not have")
        self.engine.store.load(state["tensors"])
        self.engine.step = int(state["step"])

    def close(self) -> None:
        """Ends the wire's thread and process group; no gradients can be averaged through this handle any more.

        A handle that is not needed any more does so by itself, and so does one that is left when the interpreter exits.
        """
        if self._attached:
            self._attached = False
            self.wire.close()
            # torch names a group of some ranks after them, and would meet its stale addresses under that name again.
            if dist.is_initialized() and dist.get_world_size(self._group) == dist.get_world_size():
                dist.destroy_process_group(self._group)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes.items()}
        dense = [name for name, shape in self._shapes.items() if not self.configuration.compresses(shape)]
        count, elements = len(sizes) - len(dense), sum(sizes.values())
        left = sum(sizes[name] for name in dense)
        return (
            f"gradwire.Handle({self.configuration}; compressed: {count} tensors, {elements - left:,} elements; "
            f"averaged densely: {len(dense)} tensors, {left:,} elements)"
        )


def check_parameters(parameters: Named) -> None:
    """Raises ConfigurationError unless all gradients can be averaged."""
    if not parameters:
        raise ConfigurationError("there are no parameters that require gradients; nothing can be averaged")
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ConfigurationError(f"parameter {name!r} is on the meta device; materialise the model first")
        if parameter.dtype not in GRADIENT_DTYPES:
            raise ConfigurationError(
                f"parameter {name!r} has dtype {parameter.dtype}; gradwire averages gradients of "
                f"{', '.join(str(dtype) for dtype in GRADIENT_DTYPES)}; convert it, or average it yourself"
            )
        if parameter.device != device:
            raise ConfigurationError(
                f"parameter {name!r} is on {parameter.device}, {parameters[0][0]!r} on {device}; "
                "use one device a process"
            )


def checked_verification(verify: bool, every: int) -> int:
    """Steps between two comparisons; 0 if nothing is to be verified."""
    if not isinstance(every, int) or every < 1:
        raise ConfigurationError(f"verify_every={every!r} is out of range; choose a whole number of steps, at least 1")
    return every if verify else 0


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group given, or the default one.

    Raises:
        ConfigurationError: If there is no process group yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') (or 'nccl') first"
        )
    default = dist.group.WORLD
    chosen = group if group is not None else default
    if chosen is None:
        raise ConfigurationError("this process is not in the process group; attach on its members only")
    return chosen


def _sibling(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks, backend and timeout."""
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)  # "undefined" where devices have different ones
    sibling = dist.new_group(
        ranks,
        timeout=timeout_of(group),
        backend=backend if backend != "undefined" else str(dist.get_backend_config(group)),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    if not isinstance(sibling, dist.ProcessGroup):
        raise ConfigurationError("this process is not in the process group; attach on its members only")
    return sibling
