"""Which kernels a device runs, and that they are what the reference says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numba
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Compensated, cpu, dispatch, reference
from gradwire.kernels.cpu import _disk
from gradwire.kernels.cpu._compiled import counting
from kernel_inputs import BLOCKS, KEY, normal


@pytest.mark.parametrize("name", dispatch.KERNELS)
def test_an_override_has_the_signature_of_the_reference(name: str) -> None:
    override, specified = getattr(cpu, name), getattr(reference, name)
    assert inspect.signature(override) == inspect.signature(specified) == inspect.signature(getattr(kernels, name))
    assert override is not specified


def test_everything_is_compiled_for_the_cpu_and_nothing_for_others() -> None:
    assert kernels.by_reference(torch.device("cpu")) == ()
    assert kernels.by_reference(torch.device("meta")) == ()  # which has no values to do anything with
    assert set(kernels.by_reference(torch.device("mps"))) == {
        *dispatch.KERNELS,
        *(code.__name__ for code in kernels.codes.ALL),
    }


def test_what_a_device_does_not_have_runs_by_the_reference() -> None:
    block, code = BLOCKS["odd layers"], kernels.codes.Sign()
    payload = torch.empty(kernels.payload_bytes(code, block), dtype=torch.uint8)
    for missing in ({}, {"encode": cpu.encode, "CODES": {}}):
        with (
            mock.patch.object(dispatch, "overrides", return_value=missing),
            mock.patch.object(cpu.quantise, "_encode", side_effect=AssertionError("compiled")),
        ):
            kernels.encode(code, block, Compensated(normal()), payload, KEY)


def test_without_its_compiler_a_device_runs_the_reference() -> None:
    dispatch.overrides.cache_clear()
    with mock.patch.object(dispatch, "find_spec", return_value=None) as looked_for:
        assert set(dispatch.KERNELS) < set(kernels.by_reference(torch.device("cuda", 0)))
    looked_for.assert_called_once_with("triton")
    dispatch.overrides.cache_clear()


@pytest.mark.parametrize(("capability", "old"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_an_old_gpu_runs_the_reference(capability: tuple[int, int], old: bool) -> None:
    dispatch.overrides.cache_clear()
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 2),
        mock.patch.object(torch.cuda, "get_device_capability", lambda number: capability if number else (9, 0)),
        mock.patch.object(dispatch, "find_spec", return_value=True),
        mock.patch.object(dispatch.importlib, "import_module", return_value=cpu),
    ):
        assert bool(dispatch.overrides("cuda")) is not old
    dispatch.overrides.cache_clear()


def test_what_a_device_lacks_is_said_with_the_remedy() -> None:
    assert kernels.shortcoming(torch.device("cpu")) == ""
    assert re.search(r"on mps:0 .* no kernels for such devices; train on", kernels.shortcoming(torch.device("mps", 0)))
    with mock.patch.object(dispatch, "overrides", return_value={}):
        with mock.patch.object(dispatch, "find_spec", return_value=None):
            missing = kernels.shortcoming(torch.device("cuda", 1))
        with mock.patch.object(dispatch, "find_spec", return_value=True):
            old = kernels.shortcoming(torch.device("cuda", 1))
    assert re.search(r"on cuda:1 .* Triton is not installed; pip install 'gradwire\[gpu\]'", missing)
    assert re.search(r"on cuda:1 .* capability below 8\.0.*; hide it by CUDA_VISIBLE_DEVICES", old)


def test_importing_compiles_nothing() -> None:
    command = (
        "import sys, gradwire; "
        "assert not {'numba', 'llvmlite', 'triton', 'gradwire.kernels.cpu', 'gradwire.kernels.gpu'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


def test_what_a_counter_begins_with_makes_no_function_of_its_own() -> None:
    """Numba compiles a called function once for the constant 0, and again for the numbers that follow it."""
    plus = counting(numba.njit(lambda total, value: total + value))

    @numba.njit
    def count(most: int) -> int:
        total = 0
        for value in range(most):
            total = plus(total, value)
        return int(plus(total, 3))

    assert count(3) == 6
    assert {*map(str, plus.overloads)} == {"(int64, int64)", "(int64, Literal[int](3))"}


def test_compiled_kernels_go_with_any_of_their_sources(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    sources = [tmp_path / "folder" / "called.py", tmp_path / "alone.py"]
    for source in sources:
        source.write_text("1")
    stamps = [_disk.stamp_of(tmp_path / "folder", sources[1])]
    for source in sources:
        source.write_text("2")
        stamps.append(_disk.stamp_of(tmp_path / "folder", sources[1]))
    assert len(set(stamps)) == 3
    index = cpu.quantise._encode._cache._cache_file
    assert isinstance(index, _disk.Index)
    assert index._source_stamp == _disk.STAMP


def test_what_was_kept_for_a_class_that_has_gone_is_not_read(tmp_path: Path) -> None:
    index = _disk.Index(str(tmp_path), "kernel", "stamp")
    index._save_index({"signature": "file"})
    assert index._load_index() == {"signature": "file"}
    assert _disk.Index(str(tmp_path), "kernel", "another")._load_index() == {}
    with mock.patch("pickle.loads", side_effect=AttributeError("no class Gone")):
        assert index._load_index() == {}
