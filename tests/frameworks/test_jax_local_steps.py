"""JAX: local steps between which parameters are averaged, as torch's own way in averages them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from arrays import SHAPES, gradients
from local_steps import PLANS, by_torch, nesterov
from local_steps import start as arrays
from test_jax import inputs, loss_of, same, start, tree

from gradwire import ConfigurationError, WireError
from pool import Pool


def every_plan() -> None:
    import jax

    import gradwire.jax

    rank = dist.get_rank()
    step = jax.jit(lambda params, changes: jax.tree.map(lambda one, other: one - other, params, changes))
    for plan in PLANS:
        params: Any = tree(list(arrays()))
        local = gradwire.jax.periodic(params, **plan)
        order = [list(SHAPES).index(name) for name in sorted(SHAPES)]
        expected, counted = by_torch(sorted(SHAPES), rank, 9, order, **plan)
        for number in range(9):
            params, _ = local.step(step(params, tree(gradients(rank, number))))
            for leaf, wanted in zip(jax.tree.leaves(params), expected[number], strict=True):
                assert np.array_equal(leaf, wanted), (plan, number)
        params, _ = local.synchronize(params)
        assert all(np.array_equal(*each) for each in zip(jax.tree.leaves(params), expected[-1], strict=True))
        assert (local.stats().wire_bytes, local.stats().steps, local.syncs) == counted
        local.close()


def test_every_plan_averages_as_with_torch(jax_pool: Pool) -> None:
    jax_pool.run(2, every_plan)


def train(local: Any, optimizer: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    import jax
    import optax

    @jax.jit
    def step(params: Any, state: Any, values: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_of)(params, values), state, params)
        return optax.apply_updates(params, updates), state

    for number in steps:
        params, state = local.step(*step(params, state, inputs(dist.get_rank(), number)))
    return params, state


def goes_on(folder: str) -> None:
    """From the middle of a period, with optax' moments averaged."""
    import jax
    import optax

    import gradwire.jax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    plan: dict[str, Any] = {"every": 4, "method": "topk", "ratio": 0.05, "outer": nesterov, "moments": "average"}
    local = gradwire.jax.periodic(start(), **plan)
    params, state = train(local, optimizer, start(), optimizer.init(start()), range(6))
    saved = jax.tree.map(np.array, (params, state))
    local.save(folder)
    straight = train(local, optimizer, params, state, range(6, 12))
    assert same(gradwire.jax.broadcast(straight), straight)  # moments, too
    local.close()
    local = gradwire.jax.periodic(start(), **plan)
    local.load(folder)
    resumed = train(local, optimizer, *saved, range(6, 12))
    assert same(straight, resumed)
    assert (local.steps_done, local.syncs) == (12, 3)
    local.close()


def test_a_run_that_goes_on_gives_the_same_bits(jax_pool: Pool, tmp_path: Path) -> None:
    jax_pool.run(2, goes_on, str(tmp_path))


def dropped() -> None:
    """Infinity on one rank: all go back to the last average, and its moments begin anew."""
    import jax
    import optax

    import gradwire.jax

    optimizer = optax.adam(0.01)
    local = gradwire.jax.periodic(start(), every=2)
    params, state = train(local, optimizer, start(), optimizer.init(start()), range(2))
    before = jax.tree.map(np.array, params)
    bad = jax.tree.map(lambda leaf: leaf * (np.inf if dist.get_rank() and leaf.ndim else 1), (params, state))
    params, state = local.step(*local.step(*bad))
    assert local.dropped == 1
    assert same(before, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    local.close()


def test_all_ranks_drop_an_average_together(jax_pool: Pool) -> None:
    jax_pool.run(2, dropped)


def given_by_numpy() -> None:
    """JAX takes numpy's double precision, and Python's numbers, for its own float32."""
    import gradwire.jax

    rank = dist.get_rank()
    mixed = {"a": np.ones((3, 4), None if rank else "float32"), "b": 0.5 + rank}
    params = gradwire.jax.broadcast(mixed)
    assert same(params, {"a": np.ones((3, 4)), "b": 0.5})
    local = gradwire.jax.periodic({"a": np.ones((3, 4)), "b": 0.5}, every=1)
    params, _ = local.step({"a": np.full((3, 4), 1.0 + rank), "b": params["b"] + rank})
    assert same(params, {"a": np.full((3, 4), 1.5), "b": 1.0})
    with pytest.raises(ConfigurationError, match="the parameters are of another tree than those that periodic"):
        local.step({"a": params["a"].astype("bfloat16"), "b": params["b"]})
    local.close()


def test_parameters_given_by_numpy(jax_pool: Pool) -> None:
    jax_pool.run(2, given_by_numpy)


def misused() -> float:
    import jax
    import optax

    import gradwire.jax

    rank = dist.get_rank()
    with pytest.raises(
        ConfigurationError, match=r"buffers is not for trees; give params that gradwire\.jax\.broadcast"
    ):
        gradwire.jax.periodic(start(), buffers=True)
    with pytest.raises(ConfigurationError, match="'a' has other values on rank 1 than on rank 0"):
        gradwire.jax.periodic({"a": np.full((40, 40), rank, "float32")})
    with pytest.raises(ConfigurationError, match="'a' has dtype int32; gradwire averages"):
        gradwire.jax.periodic({"a": np.zeros(4, "int32")})
    local = gradwire.jax.periodic(start(), every=1)
    lazy = gradwire.jax.periodic(start(), moments="average")
    with pytest.raises(ConfigurationError, match=r"within jax\.jit there are no values to average; call step between"):
        jax.jit(lazy.step)(start())  # no average is due, and it would be counted once for all
    with pytest.raises(ConfigurationError, match=r"the state has no moments to average; give step the state"):
        lazy.synchronize(start())
    masked = optax.masked(optax.adam(0.1), {"a": True, "b": False, "c": True}).init(start())
    with pytest.raises(ConfigurationError, match=r"mu\['a'\] belongs to no tree like params; choose moments='keep'"):
        lazy.synchronize(start(), masked)
    lazy.close()
    with pytest.raises(ConfigurationError, match="the parameters are of another tree than those that periodic"):
        local.step({"a": start()["a"]})
    params, _ = local.step(start())
    started = time.monotonic()
    if rank:
        local.close()
        return 0
    with pytest.raises(WireError, match="a worker ended or failed"):
        local.step(params)
    local.close()
    return time.monotonic() - started


def test_misuse_and_failures_are_told(jax_pool: Pool) -> None:
    assert max(jax_pool.run(2, misused)) < 20  # and not the group's timeout
