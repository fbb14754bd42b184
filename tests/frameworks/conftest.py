"""Worker processes that have one of Keras' backends; those of TensorFlow and of JAX serve loops of one's own, too."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
from keras_models import backend

from pool import Pool, copied

NEEDED = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "keras", "optax", "flax"), "torch": ("keras",)}
OF_LOOPS = {"tensorflow_pool": ["tensorflow"], "jax_pool": ["jax"], "framework_pool": ["tensorflow", "jax"]}

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of loops have the processes of Keras' tests on the same backend."""
    if "keras_pool" in metafunc.fixturenames:
        backends = next((each for name, each in OF_LOOPS.items() if name in metafunc.fixturenames), list(NEEDED))
        metafunc.parametrize("keras_pool", backends, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One backend after the other, as the processes of one end when those of another begin."""
    order = [*NEEDED, ""]
    items.sort(key=lambda item: order.index(of(item)))


def of(item: pytest.Item) -> str:
    """The backend whose processes a test has."""
    return str(item.callspec.params.get("keras_pool", "")) if hasattr(item, "callspec") else ""


def skip_without(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:  # which imports none here
            pytest.skip(f"{package} is not installed; make test-frameworks installs it")


@pytest.fixture(scope="session")
def keras_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    skip_without(*NEEDED[request.param])
    os.environ.update(KERAS_BACKEND=request.param, TF_CPP_MIN_LOG_LEVEL="3", **THREADS)
    copied(*NEEDED[request.param], "gradwire.keras")
    workers = Pool()
    assert workers.run(1, backend) == [request.param]
    yield workers
    workers.close()


@pytest.fixture
def quick_keras(quick_python: Callable[..., str]) -> Callable[[str], str]:
    """Gives a Python that begins as a copy of a process which has imported Keras on a backend, see copies.py."""

    def python(backend: str) -> str:
        skip_without(*NEEDED[backend])
        imported = (*NEEDED[backend], "gradwire.keras", "gradwire_bench.framework_worker", "sklearn.datasets")
        return quick_python(*imported, KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")

    return python


@pytest.fixture
def tensorflow_pool(keras_pool: Pool) -> Pool:
    return keras_pool


@pytest.fixture
def jax_pool(keras_pool: Pool) -> Pool:
    return keras_pool


@pytest.fixture
def framework_pool(keras_pool: Pool) -> Pool:
    return keras_pool


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    return of(request.node)
