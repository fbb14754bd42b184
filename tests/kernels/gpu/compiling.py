"""Compiles for GPUs that are not here what kernels would launch."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

from gradwire.errors import PayloadError

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DIVISIBLE = 16


def compiled(call: Callable[[], object], target: str) -> Iterator[tuple[str, CompiledKernel]]:
    """What a call launches, compiled for a target, without being launched."""
    launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, *arguments: Any, **options: Any) -> None:
        launches.append((kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", record), suppress(PayloadError):  # nothing runs, nothing is decoded
        call()
    for kernel, arguments, options in launches:
        values = inspect.signature(kernel.fn).bind(*arguments, **{k: options[k] for k in options if k in names(kernel)})
        signature, constants, attributes = {}, {}, {}
        for number, parameter in enumerate(kernel.params):
            value = values.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment:
                attributes[(number,)] = [["tt.divisibility", DIVISIBLE]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        chosen = {name: options[name] for name in ("num_warps", "enable_fp_fusion")}
        yield kernel.fn.__name__, triton.compile(source, target=TARGETS[target], options=chosen)


def names(kernel: JITFunction) -> list[str]:
    return [parameter.name for parameter in kernel.params]


def check(kernel: CompiledKernel, target: str) -> None:
    """Nothing is fused or approximated, and no register is spilt to memory."""
    assert not re.search(r"fmuladd|\b(contract|afn|arcp|reassoc|fast)\b", kernel.asm["llir"])
    if target == "gfx942":
        assert set(re.findall(r"_spill_count:\s+(\d+)", kernel.asm["amdgcn"])) == {"0"}
    else:
        ptx = kernel.asm["ptx"]
        assert not re.findall(r".*(?:fma\.rn\.f|\.approx|div\.full|\.ftz).*", ptx)
        assert spilt(kernel) == []


def spilt(kernel: CompiledKernel) -> list[str]:
    """Instructions that move registers to memory of the thread and back."""
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        instructions = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\b(?:STL|LDL)\b.*", instructions)
