"""Tensors that say they are on a GPU, with their values on the CPU: what a GPU would do, but for its speed.

What mixes devices fails as it does there, and what the host would wait for is noted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradwire import deferred
from gradwire.kernels import Code, Compensated, codes, cpu, dispatch, payload_bytes
from gradwire.layout import Block
from gradwire.memory import Store

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

ANSWERED = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "_unique2"}
"""Operators for whose answer, or its size, the host waits."""


READ = (Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__)

DIRECT = {
    Tensor.nonzero: torch.ops.aten.nonzero,
    Tensor.__invert__: torch.ops.aten.bitwise_not,
    Tensor.contiguous: lambda tensor: (
        tensor if tensor.is_contiguous() else torch.clone(tensor, memory_format=torch.contiguous_format)
    ),
}


class There(Tensor):
    """A tensor on the GPU; ``here`` are its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        layout = here.shape, here.stride(), here.storage_offset()
        made: There = Tensor._make_wrapper_subclass(cls, *layout, dtype=here.dtype, device=GPU)
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise AssertionError(f"{function} of what is elsewhere")


class _Asking(TorchFunctionMode):
    """What torch asks a device's driver for before it asks anybody else."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in READ and isinstance(arguments[0], There):
            self._waits.append("copy to the host")
            return function(arguments[0].here)
        if function is Tensor.data_ptr:
            return function(here(arguments[0]))
        if function in DIRECT and isinstance(arguments[0], There):
            return DIRECT[function](*arguments)
        if function is Tensor.new_tensor and isinstance(arguments[0], There):
            return torch.tensor(arguments[1], dtype=arguments[0].dtype, device=GPU)
        if function is Tensor.copy_:
            return self._copied(*arguments, **(options or {}))
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            return self._at(function, *arguments)
        return function(*arguments, **(options or {}))

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, There) != isinstance(target, There) and not non_blocking:
            self._waits.append("copy to the GPU" if isinstance(target, There) else "copy to the host")
        with no_dispatch():
            here(target).copy_(here(source))
        return target

    def _at(self, function: Any, target: Tensor, index: Any, *value: Any) -> Any:
        tensors = [each for each in tree_leaves(index) if isinstance(each, Tensor)]
        if not isinstance(target, There):
            if any(isinstance(each, There) for each in (*tensors, *value)):
                raise RuntimeError("what is on the GPU is an index or a value of what is on the CPU")
            return function(target, index, *value)
        if tensors and any(_has_values(each) and each.dim() and not isinstance(each, There) for each in value):
            raise RuntimeError("what is on the CPU is written to places on the GPU")
        if any(not isinstance(each, There) for each in (*tensors, *filter(_has_values, value))):
            self._waits.append("copy to the GPU")
        if any(each.dtype == torch.bool or not each.dim() for each in tensors):
            self._waits.append("index")
        with no_dispatch():
            return there(function(target.here, tree_map(here, index), *map(here, value)))


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor)


class Elsewhere(TorchDispatchMode):
    """Within it there is a GPU.

    Attributes:
        waits: The operators that the host waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name, options = function.overloadpacket.__name__, dict(options or {})
        given = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        some = any(isinstance(each, There) for each in given)
        if name == "is_pinned":
            return True
        if name == "_pin_memory":
            return arguments[0]
        goal = options.get("device")
        if goal is not None:
            options["device"] = CPU
        if name == "_to_copy":
            if goal is not None and some == (torch.device(goal) == CPU) and not options.get("non_blocking"):
                self.waits.append("copy to the host" if some else "copy to the GPU")
        elif some and any(each.dim() and not isinstance(each, There) for each in given) and "index" not in name:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {function} found cuda:0 and cpu")
        elif some and (name in ANSWERED or (name.startswith("index") and _by_bools(arguments))):
            self.waits.append(name)
        with no_dispatch():
            answer = function(*tree_map(here, arguments), **tree_map(here, options))
        goes = some if goal is None else torch.device(goal).type == GPU.type
        if not goes:
            return answer
        known = {id(each.here): each for each in given if isinstance(each, There)}  # what is changed in place
        return tree_map(lambda each: known[id(each)] if id(each) in known else there(each), answer)


def _by_bools(arguments: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(arguments[1]))


def here(value: Any) -> Any:
    """The values of a tensor that is there."""
    return value.here if isinstance(value, There) else value


def there(value: Any) -> Any:
    """A tensor's values on the GPU."""
    return There(value) if isinstance(value, Tensor) else value


def own_kernels() -> set[str]:
    """What ``kernels.gpu`` has of the reference; importing it would need Triton."""
    tree = ast.parse((Path(dispatch.__file__).parent / "gpu" / "__init__.py").read_text())
    imported = {each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    return imported & dispatch.KERNELS.keys()


def _launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Does with what is there what a kernel of the GPU's would do; the host hears nothing of it."""

    @wraps(kernel)
    def launched(*arguments: Any, **options: Any) -> Any:
        with no_dispatch():
            return tree_map(there, kernel(*tree_map(here, arguments), **tree_map(here, options)))

    return launched


def encode_each(code: Code, blocks: tuple[Block, ...], source: Compensated, payloads: Tensor, key: int) -> None:
    """What a GPU does at once."""
    for block, payload in zip(blocks, payloads, strict=True):
        size = payload_bytes(code, block)
        cpu.encode(code, block, source, payload[:size], key)
        payload[size:] = 0


def decode_each(code: Code, blocks: tuple[Block, ...], payloads: Tensor, out: Tensor) -> None:
    """What a GPU does at once."""
    for block, payload in zip(blocks, payloads, strict=True):
        cpu.decode(code, block, payload[None, : payload_bytes(code, block)], out, 1.0)


@contextmanager
def a_gpu() -> Iterator[Elsewhere]:
    """A process with a GPU that has the kernels there are for one."""
    own: dict[str, Any] = {name: _launched(getattr(cpu, name)) for name in own_kernels()}
    own |= {"encode_each": _launched(encode_each), "decode_each": _launched(decode_each)}
    own["CODES"] = set(codes.ALL)
    known = dispatch.overrides

    def overrides(device: str) -> Any:
        return own if device == GPU.type else known(device)

    settle, settling = deferred.Later.settle, False

    def settled(later: deferred.Later) -> None:
        nonlocal settling
        settling = True
        try:
            settle(later)
        finally:
            settling = False

    def sent_to_host(values: Tensor) -> Callable[[], Tensor]:
        def arrived() -> Tensor:
            if not settling:  # what was collected has come long before
                mode.waits.append("copy to the host")
            return here(values).clone()

        return arrived

    def scratch(store: Store, numel: int, purpose: str = "") -> Tensor:
        return torch.empty(numel, dtype=torch.float32, device=store.device)

    with (
        mock.patch.object(dispatch, "overrides", overrides),
        mock.patch.object(deferred, "sent_to_host", sent_to_host),
        mock.patch.object(deferred.Later, "settle", settled),
        mock.patch.object(Store, "scratch", scratch),
        mock.patch("gradwire.engine.engine.marks_of", return_value=None),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        torch.no_grad(),
        FakeTensorMode(),  # so that torch looks for no driver
        Elsewhere() as mode,
        _Asking(mode.waits),
    ):
        yield mode
