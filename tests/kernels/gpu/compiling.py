"""What kernels launch, recorded by a driver that has no GPU, and compiled for GPUs that are not here."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver as drivers
from triton.runtime.jit import JITFunction

from gradwire.errors import PayloadError
from gradwire.kernels.gpu import _launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """What a driver is told."""

    name: str
    grid: tuple[int, int, int]
    device: int
    stream: int
    arguments: tuple[Any, ...]
    source: ASTSource
    options: dict[str, Any]

    @property
    def specialized(self) -> str:
        """What it was compiled for."""
        return str((self.source.signature, self.source.constants, self.source.attrs, self.options["num_warps"]))

    def compiled(self, target: str) -> CompiledKernel:
        chosen = {name: self.options[name] for name in ("num_warps", "enable_fp_fusion")}
        return triton.compile(self.source, target=TARGETS[target], options=chosen)


@dataclass
class Driver:
    """Stands for CUDA's: Triton specialises and launches as it does there, and nothing runs."""

    device: int = 0
    launches: list[Launch] = field(default_factory=list)
    variants: int = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> GPUTarget:
        return TARGETS["sm_90"]

    def compile(self, source: ASTSource, target: GPUTarget, options: dict[str, Any], **others: Any) -> Any:
        self.variants += 1

        return Recorded(self, source, options)

    @contextmanager
    def device_of(self, tensor: torch.Tensor) -> Iterator[None]:
        """As if tensors were on the second GPU."""
        before, self.device = self.device, 1
        yield
        self.device = before


@dataclass
class Recorded:
    """Stands for a compiled kernel."""

    driver: Driver
    source: ASTSource
    options: dict[str, Any]
    function: None = None
    packed_metadata: None = None

    def launch_metadata(self, *given: Any) -> None: ...

    def run(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        _, _, _, *arguments = rest
        name, driver = self.source.fn.fn.__name__, self.driver
        launch = Launch(name, (x, y, z), driver.device, stream, tuple(arguments), self.source, self.options)
        driver.launches.append(launch)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        stream = self.driver.get_current_stream(self.driver.device)
        return lambda *arguments: self.run(*grid, stream, None, None, None, None, None, *arguments)


@contextmanager
def a_driver() -> Iterator[Driver]:
    """Within it Triton has a driver, and has compiled nothing yet."""
    driver = Driver()
    with (
        mock.patch.object(drivers, "_active", driver),
        mock.patch("triton.compiler.compile", driver.compile),
        mock.patch.object(torch.cuda, "device_of", driver.device_of),
        mock.patch.dict(_launch._compiled, clear=True),
    ):
        for name, module in list(sys.modules.items()):
            for each in vars(module).values() if name.startswith("gradwire.kernels.gpu") else ():
                if isinstance(each, JITFunction):
                    each.device_caches.clear()
        yield driver


def launched(call: Callable[[], object]) -> list[Launch]:
    """What a call launches."""
    with a_driver() as driver, suppress(PayloadError):  # nothing runs, nothing is decoded
        call()
    return driver.launches


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
    """Instructions that move registers to memory of the thread and back.

    They need a stack; where there is none, they need not be written out, which takes a hundred times as long.
    """
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        stack = re.findall(r"\bSTACK:(\d+)", said_by(tool, "-res-usage", file.name))
        instructions = said_by(tool, "-sass", file.name) if stack != ["0"] else ""
    return re.findall(r"\b(?:STL|LDL)\b.*", instructions)


def said_by(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
