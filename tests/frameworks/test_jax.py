"""JAX: averages under jit, as a part of optax' chains, in order, and with a state that cannot go astray unseen."""

from __future__ import annotations

import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from arrays import SHAPES, asked, assert_measured, by_torch, gradients, remembered, torch_synchronizer

from catalogue import OPTIONS
from gradwire import ConfigurationError, GradwireError, WireError, methods
from gradwire.lab import Lab
from pool import Pool

METHODS: list[tuple[str, dict[str, Any]]] = [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 2})]


def tree(arrays: list[Any]) -> dict[str, Any]:
    return dict(zip(SHAPES, arrays, strict=True))


def every_method() -> None:
    import jax

    import gradwire.jax

    assert_measured(gradwire.jax.Synchronizer(tree(gradients(0, 9))))
    for name in methods.names():
        options = OPTIONS.get(name, [{}])[0]
        sync = gradwire.jax.Synchronizer(tree(gradients(0, 9)), name, **options)
        names = list(sync.cells)
        assert names == sorted(SHAPES)  # jax sorts keys
        order = [list(SHAPES).index(each) for each in names]
        expected, average = torch_synchronizer(names, name, order=order, **options), jax.jit(sync.average)
        for step in range(3):
            with asked() as ours:
                averages = jax.block_until_ready(average(tree(gradients(dist.get_rank(), step))))
            with asked() as theirs:
                wanted = by_torch(expected, names, dist.get_rank(), step, order)
            assert ours == theirs, name
            assert ours, name
            for key, each in zip(names, wanted, strict=True):
                assert np.array_equal(averages[key], each), (name, key)
        assert sync.stats().wire_bytes == expected.stats().wire_bytes
        assert remembered(sync) == remembered(expected)
        sync.close()
        expected.close()


def test_every_method_averages_as_with_torch(jax_pool: Pool) -> None:
    jax_pool.run(2, every_method)


def start() -> dict[str, Any]:
    noise = np.random.default_rng(3)
    return {
        name: 0.3 * noise.normal(size=s).astype("float32")
        for name, s in {"a": (12, 30), "b": (30,), "c": (30, 4)}.items()
    }


def loss_of(params: Any, values: Any) -> Any:
    import jax.numpy as jnp

    return jnp.mean(jnp.square(jnp.tanh(values @ params["a"] + params["b"]) @ params["c"] - 1))


def inputs(rank: int, step: int) -> Any:
    return np.random.default_rng(10 * step + rank).normal(size=(16, 12)).astype("float32")


def whole(step: int) -> Any:
    return np.concatenate([inputs(rank, step) for rank in range(dist.get_world_size())])


def steps(optimizer: Any, params: Any, state: Any, batches: list[Any], scan: bool = False) -> Any:
    """Parameters and state after some steps, compiled one by one or as one loop."""
    import jax
    import jax.numpy as jnp
    import optax

    def step(carried: Any, values: Any) -> tuple[Any, Any]:
        params, state = carried
        updates, state = optimizer.update(jax.grad(loss_of)(params, values), state, params)
        return (optax.apply_updates(params, updates), state), None

    if scan:
        return jax.jit(lambda carried, values: jax.lax.scan(step, carried, values)[0])(
            (params, state), jnp.stack(batches)
        )
    compiled, carried = jax.jit(step), (params, state)
    for values in batches:
        carried, _ = compiled(carried, values)
    return carried


def same(one: Any, other: Any) -> bool:
    import jax

    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def dense_is_one_process_with_the_whole_batch() -> None:
    import jax
    import optax

    import gradwire.jax

    alone = optax.sgd(0.1, momentum=0.9)
    expected, _ = steps(alone, start(), alone.init(start()), [whole(step) for step in range(20)])
    for scan in (False, True):
        sync = gradwire.jax.Synchronizer(start(), "dense")
        chain = optax.chain(sync.transformation(), optax.sgd(0.1, momentum=0.9))
        mine = [inputs(dist.get_rank(), step) for step in range(20)]
        params, state = steps(chain, start(), chain.init(start()), mine, scan)
        jax.block_until_ready(params)
        assert sync.stats().steps == 20 == int(state[0].step)
        assert max(np.abs(params[name] - expected[name]).max() for name in params) < 1e-6
        sync.close()


@pytest.mark.parametrize("workers", [2, 4])
def test_dense_is_one_process_with_the_whole_batch(jax_pool: Pool, workers: int) -> None:
    jax_pool.run(workers, dense_is_one_process_with_the_whole_batch)


def goes_on(folder: str, method: str, options: dict[str, Any]) -> None:
    import jax
    import optax

    import gradwire.jax

    def attached() -> tuple[Any, Any]:
        sync = gradwire.jax.Synchronizer(start(), method, **options)
        return sync, optax.chain(sync.transformation(), optax.adam(0.01))

    batches = [inputs(dist.get_rank(), step) for step in range(10)]
    sync, optimizer = attached()
    params, state = steps(optimizer, start(), optimizer.init(start()), batches[:5])
    saved = jax.tree.map(np.array, (params, state))
    sync.save(folder)
    straight, _ = steps(optimizer, params, state, batches[5:])
    straight = jax.tree.map(np.array, straight)
    sync.close()
    sync, optimizer = attached()
    sync.load(folder)
    resumed, _ = steps(optimizer, *saved, batches[5:])
    assert same(straight, resumed)
    assert same(gradwire.jax.broadcast(resumed), resumed)
    assert same(optimizer.init(start())[0].step, 10)
    sync.close()

    sync, optimizer = attached()  # and nothing loaded
    with pytest.raises(Exception, match=r"state is at average 5, what gradwire remembers at 0; save and restore both"):
        jax.block_until_ready(steps(optimizer, *saved, batches[5:6]))
    assert isinstance(sync.failed, GradwireError)
    sync.close()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_run_that_goes_on_gives_the_same_bits(
    jax_pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    jax_pool.run(2, goes_on, str(tmp_path), method, options)


def within_others() -> None:
    """Bad steps are left out together where averages are looked at; accumulation around the chain is told of."""
    import jax
    import optax

    import gradwire.jax

    sync = gradwire.jax.Synchronizer(start(), "topk", ratio=0.05, rollback=True)
    optimizer = optax.chain(sync.transformation(), optax.apply_if_finite(optax.sgd(0.1), 5))
    good = [inputs(dist.get_rank(), step) for step in range(4)]
    before = steps(optimizer, start(), optimizer.init(start()), good[:2])
    kept = remembered(sync)
    bad = good[2] * (np.inf if dist.get_rank() == 1 else 1)
    after = steps(optimizer, *before, [np.float32(bad)])
    assert same(before[0], after[0])
    assert remembered(sync) == kept
    params, _ = steps(optimizer, *after, good[2:])
    assert same(gradwire.jax.broadcast(params), params)
    assert sync.steps() == 4
    sync.close()

    sync = gradwire.jax.Synchronizer(start(), "topk", ratio=0.05)
    optimizer = optax.MultiSteps(optax.chain(sync.transformation(), optax.sgd(0.1)), 2)
    with pytest.raises(Exception, match=r"accumulate gradients before they are averaged, not in optax\.MultiSteps"):
        jax.block_until_ready(steps(optimizer, start(), optimizer.init(start()), good))
    sync.close()

    sync, seldom = gradwire.jax.Synchronizer(start(), "topk", ratio=0.05), lambda step: step % 2 == 0
    kinds = optax.conditionally_transform, optax.conditionally_mask, optax.apply_if_finite
    for kind, when in zip(kinds, (seldom, seldom, 5), strict=True):
        after = optax.chain(sync.transformation(), kind(optax.sgd(0.1), when))
        params, _ = steps(after, start(), after.init(start()), good)
        assert same(gradwire.jax.broadcast(params), params)
        around = kind(optax.chain(sync.transformation(), optax.sgd(0.1)), when)
        for scan in (False, True):
            with pytest.raises(ConfigurationError, match=rf"optax\.{kind.__name__} not all ranks average; chain"):
                steps(around, start(), around.init(start()), good, scan)
    assert sync.steps() == 12
    sync.close()


def test_within_other_transformations(jax_pool: Pool) -> None:
    jax_pool.run(2, within_others)


def libraries() -> None:
    """Flax' modules of both kinds; half precision stays so."""
    import flax.linen
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import gradwire.jax

    rank = dist.get_rank()
    values = inputs(rank, 0)
    linen = flax.linen.Dense(30)
    params = linen.init(jax.random.key(rank), values)
    with pytest.raises(ConfigurationError, match=r"'params\.bias|'params\.kernel' has other values on rank 1"):
        gradwire.jax.Synchronizer(params, "topk")
    params = gradwire.jax.broadcast(params)
    sync = gradwire.jax.Synchronizer(params, "topk", ratio=0.05)
    grads = jax.jit(lambda p: sync.average(jax.grad(lambda p: jnp.sum(linen.apply(p, values) ** 2))(p)))(params)
    assert same(gradwire.jax.broadcast(grads), grads)
    with pytest.raises(ConfigurationError, match=r"the gradient of 'params\.bias' has shape \(4,\), the par"):
        sync.average(jax.tree.map(lambda each: each[:4], grads))
    with pytest.raises(ConfigurationError, match="there are 1 gradients for 2 parameters; give one of each"):
        sync.average(grads["params"]["bias"])
    sync.close()

    model = nnx.Linear(12, 30, rngs=nnx.Rngs(0))
    sync = gradwire.jax.Synchronizer(nnx.state(model, nnx.Param), "acpsgd", rank=2)
    optimizer = nnx.Optimizer(model, optax.chain(sync.transformation(), optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, values: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(values) ** 2))(model))

    for number in range(3):
        step(model, optimizer, inputs(rank, number))
    kernel = np.asarray(model.kernel[...])
    assert np.array_equal(gradwire.jax.broadcast(kernel), kernel)
    assert sync.steps() == 3
    sync.close()

    sync = gradwire.jax.Synchronizer(jnp.zeros((40, 40), jnp.bfloat16), "dense")
    average = sync.average(jnp.full((40, 40), rank, jnp.bfloat16))
    assert average.dtype == jnp.bfloat16
    assert bool((average == 0.5).all())
    assert list(sync.cells) == ["params"]
    sync.close()


def test_trees_of_libraries(jax_pool: Pool) -> None:
    jax_pool.run(2, libraries)


def kinds_of_programs() -> None:
    """Arguments that are given away, arrays that must stay as they are, clipping around, what cannot be averaged."""
    import jax
    import jax.numpy as jnp
    import optax

    import gradwire.jax

    rank = dist.get_rank()
    single = np.full((40, 40), rank, "float32")
    params = jnp.zeros((40, 40))
    sync, kept = gradwire.jax.Synchronizer(params, "dense"), weakref.ref(params)
    del params
    assert kept() is None  # it needs shapes only
    for average in (sync.average, jax.jit(sync.average), jax.jit(sync.average, donate_argnums=0)):
        given = jnp.array(single)
        assert bool((average(given) == 0.5).all())
        assert given.is_deleted() or np.array_equal(given, single)
    for wrong in (np.ones((40, 40), "int32"), np.ones((40, 40), "complex64")):
        with pytest.raises(ConfigurationError, match=r"'params' is (int32|complex64); give float32, float16"):
            sync.average(wrong)
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(sync.average)(jnp.ones((2, 40, 40)))
    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(lambda values: sync.average(values).sum())(jnp.ones((40, 40)))
    assert sync.steps() == 3
    sync.close()

    with pytest.raises(ConfigurationError, match=r"two parameters have the name 'a\.b'"):
        gradwire.jax.Synchronizer({"a": {"b": single}, "a.b": single}, "dense")
    partly = {"a": start()["a"], "none": None, "bfloat16": jnp.ones(33, jnp.bfloat16)}
    sync = gradwire.jax.Synchronizer(partly, "dense")
    averages = jax.jit(sync.average)({"a": np.full((12, 30), rank, "float32"), "none": None, "bfloat16": jnp.ones(33)})
    assert averages["none"] is None
    assert float(averages["a"].mean()) == 0.5
    sync.close()
    with pytest.raises(ConfigurationError, match="'count' has dtype int32; gradwire averages gradients of real"):
        gradwire.jax.Synchronizer({**start(), "count": jnp.zeros(3, jnp.int32)}, "dense")
    with jax.enable_x64(True):
        sync = gradwire.jax.Synchronizer({"wide": jnp.zeros(3, jnp.float64)}, "dense")
        averages = sync.average({"wide": np.full(3, rank / 3)})
        assert averages["wide"].dtype == jnp.float64
        assert float(averages["wide"][0]) == np.float32(np.float32(1 / 3) / 2)  # with the digits of float32
        sync.close()
        sync = gradwire.jax.Synchronizer(start(), "dense")
        optimizer = optax.chain(sync.transformation(), optax.sgd(0.1))
        params, state = steps(optimizer, start(), optimizer.init(start()), [inputs(rank, step) for step in range(3)])
        assert state[0].step.dtype == jnp.int32
        assert same(gradwire.jax.broadcast(params), params)
        sync.close()

    for before in (True, False):  # where ranks clip what is theirs, and where all clip the average
        sync = gradwire.jax.Synchronizer(start(), "acpsgd", rank=2)
        clip, average = optax.clip_by_global_norm(0.01), sync.transformation()
        optimizer = optax.chain(*((clip, average) if before else (average, clip)), optax.adam(0.01))
        step = jax.jit(lambda *given: steps(optimizer, *given), donate_argnums=(0, 1))  # noqa: B023
        params, state = jax.tree.map(jnp.array, (start(), optimizer.init(start())))
        for number in range(3):
            params, state = step(params, state, [inputs(rank, number)])
        assert same(gradwire.jax.broadcast(params), params)
        assert sync.steps() == 3
        sync.close()


def test_kinds_of_programs(jax_pool: Pool) -> None:
    jax_pool.run(2, kinds_of_programs)


def a_rank_fails() -> float:
    import jax

    import gradwire.jax

    sync = gradwire.jax.Synchronizer(start(), "topk", ratio=0.05)
    average = jax.jit(sync.average)
    jax.block_until_ready(average(start()))
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 1:
        sync.close()
        return 0
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the connection was closed.*a worker ended or failed"):
        jax.block_until_ready(average(start()))
    assert isinstance(sync.failed, WireError)
    sync.close()
    return time.monotonic() - started


def test_a_rank_that_ends_is_told_of(jax_pool: Pool) -> None:
    assert max(jax_pool.run(2, a_rank_fails)) < 20  # and not the group's timeout


def several_devices() -> None:
    import jax

    import gradwire.jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_device_count", lambda: 4)
        with pytest.raises(ConfigurationError, match="this process has 4 devices of JAX's; start a process for each"):
            gradwire.jax.Synchronizer(start(), "topk")
    with pytest.raises(ConfigurationError, match=r"jax\.distributed is not initialized"):
        gradwire.jax.init_process_group()


def test_several_devices_are_refused(jax_pool: Pool) -> None:
    jax_pool.run(2, several_devices)


STARTED = """
import os
import jax
jax.distributed.initialize(os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
                           int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
import gradwire.jax
gradwire.jax.init_process_group()
sync = gradwire.jax.Synchronizer(jax.numpy.zeros((40, 40)), "dense")
print(float(sync.average(jax.numpy.full((40, 40), float(os.environ["RANK"]))).mean()))
sync.close()
"""


def test_started_by_jax(jax_pool: Pool) -> None:
    with Lab(2, None) as lab:
        assert lab.run([sys.executable, "-c", STARTED], timeout=120).outputs == ["0.5\n", "0.5\n"]
