"""JAX goes on before a step is made: whoever asks a handle then waits for the averages that were asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gradwire.lab import Lab
from pool import Pool


def dispatched(sync: Any) -> Any:
    """A step that JAX has not begun on all ranks, as rank 0's gradients take it long."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def slowly(values: Any) -> Any:
        return jax.lax.fori_loop(0, 40, lambda _, each: jnp.tanh(each @ each), values)

    values = jnp.full((400, 400), dist.get_rank(), jnp.float32)
    jax.block_until_ready((jax.jit(sync.average)(values), slowly(values)))
    return jax.jit(sync.average)(values if dist.get_rank() else jnp.zeros_like(values) * slowly(values))


def asked_at_once(folder: str) -> None:
    import jax.numpy as jnp

    import gradwire.jax

    def begun() -> tuple[Any, Any]:
        sync = gradwire.jax.Synchronizer(jnp.zeros((400, 400)), "dense")
        return sync, dispatched(sync)

    sync, average = begun()
    assert sync.steps() == 2
    assert bool((average == 0.5).all())
    sync.close()

    sync, average = begun()
    assert sync.state_dict()["step"] == 2
    sync.save(folder)
    sync.close()

    sync, average = begun()
    sync.load(folder)
    assert sync.steps() == 2
    assert bool((average == 0.5).all())
    sync.close()

    sync, average = begun()
    sync.pause()
    assert bool((average == 0.5).all())
    sync.close()

    sync, average = begun()
    sync.close()
    assert np.array_equal(average, np.full((400, 400), 0.5))
    assert sync.failed is None


def test_a_handle_waits_for_what_was_dispatched(jax_pool: Pool, tmp_path: Path) -> None:
    jax_pool.run(2, asked_at_once, str(tmp_path))


ENDING = """
import os
import jax, jax.numpy as jnp
import torch.distributed as dist
import gradwire.jax
dist.init_process_group("gloo")
sync = gradwire.jax.Synchronizer(jnp.zeros((400, 400)), "dense")
slowly = jax.jit(lambda values: jax.lax.fori_loop(0, 40, lambda _, each: jnp.tanh(each @ each), values))
values = slowly(jnp.full((400, 400), float(os.environ["RANK"])))
average = jax.jit(sync.average)(values)
if os.environ["RANK"] == "0":
    print(float(average.mean()))
"""


def test_a_process_that_ends_makes_its_last_average(jax_pool: Pool) -> None:
    with Lab(2, None) as lab:
        assert lab.run([sys.executable, "-c", ENDING], timeout=120).outputs == ["0.5\n", ""]
