"""What a machine has and lacks for gradwire, and the remedy for each lack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from gradwire import kernels, lab
from gradwire.errors import ConfigurationError
from gradwire.kernels import dispatch
from gradwire_bench import data

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        subject: What was looked at.
        state: ``"ok"``, ``"limited"`` (gradwire works, something else does not) or ``"broken"``.
        found: What was found.
        remedy: What to do; empty where there is nothing to do.
    """

    subject: str
    state: Literal["ok", "limited", "broken"]
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Looks at all there is to look at; takes a second and changes nothing."""
    return [*_torch(), _threads(), _lab(), *_kernels(), *_bench_packages(), _images()]


def _torch() -> Iterator[Finding]:
    version = torch.__version__
    recent = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= OLDEST_TORCH
    oldest = ".".join(map(str, OLDEST_TORCH))
    yield Finding(
        "torch",
        "ok" if recent else "broken",
        version,
        "" if recent else f"gradwire needs torch {oldest} or newer: pip install 'torch>={oldest}'",
    )
    if not dist.is_available():
        yield Finding("backends", "broken", "torch.distributed is not in this build", "install an official torch build")
        return
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, available in checks.items() if available()]
    yield Finding(
        "backends",
        "ok" if "gloo" in backends else "limited",
        ", ".join(backends) or "none",
        "" if "gloo" in backends else "the benchmarks run on gloo; install an official torch build",
    )
    gpus = torch.cuda.device_count()
    yield Finding("GPUs", "ok", f"{gpus} seen by torch" if gpus else "none seen by torch; gradients stay on the CPU")


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{threads} for torch's operators, {cores} cores"
    if threads > cores:
        return Finding("threads", "limited", found, f"set OMP_NUM_THREADS={cores} or less")
    return Finding("threads", "ok", found)


def _lab() -> Finding:
    possible = lab.availability()
    if possible.possible:
        return Finding("shaped network", "ok", f"possible, as {possible.how}")
    return Finding("shaped network", "limited", "not possible", possible.reason)


def _kernels() -> Iterator[Finding]:
    """Where compiled kernels are kept, and what would run by the reference, on every type of device that is here."""
    try:
        dispatch.overrides("cpu")
    except ConfigurationError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield Finding("kernel cache", "broken", found, remedy)
        return
    from gradwire.kernels.cpu import _compiled

    folder = Path(_compiled.largest_magnitude.stats.cache_path).resolve()
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen and Path(chosen).resolve() not in folder.parents:
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
        yield Finding("kernel cache", "limited", f"in {folder}, as {chosen} cannot be written", remedy)
    else:
        yield Finding("kernel cache", "ok", f"in {folder}")
    for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        if slow := kernels.by_reference(torch.device(kind)):
            remedy = kernels.shortcoming(torch.device(kind))
            yield Finding(f"kernels on {kind}", "limited", f"by the reference, slowly: {', '.join(slow)}", remedy)
        else:
            yield Finding(f"kernels on {kind}", "ok", "all compiled")


def _bench_packages() -> Iterator[Finding]:
    for package, module, use in (("matplotlib", "matplotlib", "pictures"), ("scikit-learn", "sklearn", "digits")):
        if util.find_spec(module):
            yield Finding(package, "ok", metadata.version(package))
        else:
            yield Finding(package, "limited", f"not installed: no {use} in benchmarks", "pip install 'gradwire[bench]'")


def _images() -> Finding:
    if directory := data.find_fashion_mnist():
        return Finding("Fashion-MNIST", "ok", f"in {directory}")
    return Finding(
        "Fashion-MNIST",
        "limited",
        "not on this machine",
        f"`gradwire bench train` downloads Debian's {data.DEBIAN_PACKAGE} where apt-get exists; else put the four .gz "
        f"files into {data.cache_directory() / 'fashion-mnist'}; without them it uses digits",
    )
