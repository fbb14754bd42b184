"""Where and how a number was measured, and the files that say so."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigurationError


def machine() -> dict[str, Any]:
    """The machine and the software that a number was measured on."""
    import torch

    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
        "gradwire": _version("gradwire"),
        "torch": torch.__version__,  # with its build, which what is installed does not say
        **{package: _version(package) for package in ("numpy", "numba")},
    }


def command() -> str:
    """What was typed."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name
    named = ["python", "-m", module] if module.startswith("gradwire_bench.") else ["gradwire"]
    return shlex.join([*named, *sys.argv[1:]])


def document(kind: str, **content: Any) -> dict[str, Any]:
    """The envelope of every JSON that gradwire writes.

    Args:
        kind: What the document holds, such as ``"bench.sync"``.
        **content: The document's own fields; dataclasses become objects, their properties included.
    """
    return {
        "schema": f"gradwire.{kind}/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "machine": machine(),
        **{field: _plain(value) for field, value in content.items()},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a document, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that is written within.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; choose another path") from error


def require(*libraries: str) -> None:
    """Makes sure that libraries are there that come with the extra ``bench``.

    Raises:
        ConfigurationError: If one is not installed.
    """
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"{', '.join(missing)} is not installed; install it with: pip install 'gradwire[bench]'"
        )


def machine_line() -> str:
    """The machine in one line, for under a table."""
    facts = machine()
    return f"{datetime.now(UTC):%Y-%m-%d}, {hardware(facts)}, torch {facts['torch']}"


def hardware(facts: Mapping[str, Any]) -> str:
    """Processor, cores and memory of a :func:`machine`, in words."""
    memory = "" if facts["memory_gib"] is None else f", {facts['memory_gib']:g} GiB"
    return f"{facts['cpu']}, {facts['cores']} cores{memory}"


def _plain(value: Any) -> Any:
    """What JSON can say of a value: dataclasses become objects, with their properties."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        properties = (name for name, member in vars(type(value)).items() if isinstance(member, property))
        return fields | {name: _plain(getattr(value, name)) for name in properties}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf"):  # Windows has none
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version(package: str) -> str:
    """Of what is installed; the tree alone has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
