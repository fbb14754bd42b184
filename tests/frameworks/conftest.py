"""Worker processes that have one of Keras' backends, or TensorFlow and JAX together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from keras_models import backend

from pool import Pool

NEEDED = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "keras"), "torch": ("keras",)}


def started(backend: str) -> Iterator[Pool]:
    """Workers with a backend; skips where a package is missing, without importing any here."""
    for package in NEEDED[backend]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-frameworks installs it")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    workers = Pool(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", **threads)
    yield workers
    workers.close()


@pytest.fixture(scope="session", params=list(NEEDED))
def keras_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    for workers in started(request.param):
        assert workers.run(1, backend) == [request.param]
        yield workers


@pytest.fixture(scope="session")
def tensorflow_pool() -> Iterator[Pool]:
    yield from started("tensorflow")


@pytest.fixture(scope="session")
def jax_pool() -> Iterator[Pool]:
    for package in ("optax", "flax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-frameworks installs it")
    yield from started("jax")
