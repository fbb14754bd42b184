"""Who does not use a trainer does not import it; who does and has not installed it is told how to."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import gradwire

PACKAGES = ("accelerate", "transformers", "lightning", "ray", "torchft")


def test_gradwire_imports_none_of_them() -> None:
    command = (
        "import sys, gradwire, gradwire.integrations; gradwire.compress, gradwire.periodic, gradwire.redistribute; "
        f"assert not {{*{PACKAGES}}} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_its_remedy(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gradwire.integrations.{package}", raising=False)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'gradwire\[{package}\]'"):
        __import__(f"gradwire.integrations.{package}")


@pytest.mark.parametrize("package", ["accelerate", "transformers", "lightning", "ray"])
def test_the_method_where_none_is_named_is_that_of_compress(package: str) -> None:
    module = pytest.importorskip(f"gradwire.integrations.{package}")
    attach = module.GradwireCallback if package == "lightning" else module.compress
    methods = [inspect.signature(each).parameters["method"].default for each in (attach, gradwire.compress)]
    assert methods[0] == methods[1] != inspect.Parameter.empty
