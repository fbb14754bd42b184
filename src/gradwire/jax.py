"""JAX: gradients are averaged, compressed, from within a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire import bridge
from gradwire.bridge import Bridge, Described
from gradwire.engine import Methods
from gradwire.errors import ConfigurationError

try:
    import jax
    import jax.numpy as jnp
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(f"{error}; JAX comes with pip install 'gradwire[jax]'") from error


class State(NamedTuple):
    """What travels in an optax state: how many averages there were, an ``int32``."""

    step: jax.Array


class Synchronizer(Bridge):
    """Averages gradients shaped as ``params`` over all processes, within ``jax.jit`` or without.

    To be made on every rank with the same arguments; each process has one device. What the method remembers stays in
    the handle: save and restore it beside the parameters.

    Args:
        params: Any tree of arrays, the same values on all ranks; :func:`broadcast` makes them so.
        method: As in :func:`gradwire.compress`.
        process_group: As in :class:`gradwire.Synchronizer`, and so are the options.
        **options: The other choices and the method's hyper-parameters.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.

    Example::

        sync = gradwire.jax.Synchronizer(params, "topk", ratio=0.01)
        optimizer = optax.chain(sync.transformation(), optax.adam(1e-3))
    """

    def __init__(self, params: Any, method: Methods, *, process_group: Any = None, **options: Any) -> None:
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]

        def arrays() -> list[Described]:
            check_devices()
            names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]
            named = zip(names, leaves, strict=True)
            return [Described(name, tuple(jnp.shape(leaf)), jnp.result_type(leaf).name) for name, (_, leaf) in named]

        super().__init__(arrays, method, process_group, options)
        self.check_equal((each.name, np.array(leaf)) for each, (_, leaf) in zip(self.arrays, leaves, strict=True))

    def average(self, gradients: Any) -> Any:
        """The averages over all workers, with the structure and dtypes of ``gradients``.

        To be called as often on every rank. In a program that averages twice nothing but data orders the two; make the
        second depend on the first, or use :meth:`transformation`.

        Raises:
            ConfigurationError: If they are not shaped as the parameters.
            JaxRuntimeError: With the text of what failed, which :attr:`failed` keeps; where JAX waits for the result.
        """
        return self._average(gradients, None)[0]

    def transformation(self) -> Any:
        """The average as an ``optax.GradientTransformation``, to be the first of a chain.

        Its state counts averages, which keeps them in order. A state that is not of as many as the handle has made
        raises in place of an average: parameters and handle were saved at different steps, or ``optax.MultiSteps``
        around it averages every small step. ``optax.apply_if_finite``, which looks at what it is given, goes after it
        in the chain, with ``rollback=True`` for the synchronizer: around it, ranks would decide each by itself.
        """
        import optax

        def init(params: Any) -> State:
            return State(jnp.asarray(self.steps(), jnp.int32))

        def update(updates: Any, state: State, params: Any = None) -> tuple[Any, State]:
            return self._average(updates, state)

        return optax.GradientTransformation(init, update)

    def _average(self, gradients: Any, state: State | None) -> tuple[Any, Any]:
        # Their tree may differ from that of the parameters: flax.nnx gives bare arrays for its variables.
        leaves, tree = jax.tree_util.tree_flatten(gradients)
        found, wanted = [jnp.shape(leaf) for leaf in leaves], [each.shape for each in self.arrays]
        if found != wanted:
            place = next(
                (p for p, (ours, theirs) in enumerate(zip(wanted, found, strict=False)) if ours != theirs), None
            )
            what = f"{len(found)} arrays" if place is None else f"shape {found[place]} for {self.arrays[place].name!r}"
            of = f"{len(wanted)} parameters" if place is None else f"a parameter of shape {wanted[place]}"
            raise ConfigurationError(
                f"the gradients have {what}; the synchronizer was made for {of}; give their gradients"
            )
        averages, step = averaged(self, leaves, None if state is None else state.step)
        return jax.tree_util.tree_unflatten(tree, averages), None if step is None else State(step)


def broadcast(tree: Any, process_group: Any = None) -> Any:
    """A tree of arrays as rank 0 has it; to be called on all ranks, with the same shapes and dtypes."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    values = [np.array(leaf) for leaf in leaves]
    bridge.broadcast(values, process_group)
    return jax.tree_util.tree_unflatten(structure, [jnp.asarray(value) for value in values])


def init_process_group(**options: Any) -> None:
    """Starts ``torch.distributed`` among the processes of ``jax.distributed``, which find each other by its store.

    Under ``torchrun`` call ``torch.distributed.init_process_group("gloo")`` and leave ``jax.distributed`` alone.

    Args:
        **options: Of ``torch.distributed.init_process_group``, such as ``timeout``.

    Raises:
        ConfigurationError: If ``jax.distributed`` is not initialized.
    """
    from jax._src.distributed import global_state  # its only store that needs no collective

    if global_state.client is None:
        raise ConfigurationError("jax.distributed is not initialized; call jax.distributed.initialize(...) first")
    rank, workers = global_state.process_id, global_state.num_processes
    host = global_state.coordinator_address.rpartition(":")[0]
    key, seconds = "gradwire/store", 300
    if rank == 0:
        store = TCPStore(host, 0, workers, is_master=True, wait_for_workers=False)
        global_state.client.key_value_set(key, str(store.port))
    else:
        port = int(global_state.client.blocking_key_value_get(key, seconds * 1000))
        store = TCPStore(host, port, workers, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, **options)


def check_devices() -> None:
    """Raises ConfigurationError unless this process has one device of JAX's."""
    if (count := jax.local_device_count()) > 1:
        raise ConfigurationError(
            f"this process has {count} devices of JAX's; start a process for each, without XLA_FLAGS="
            "--xla_force_host_platform_device_count, or with CUDA_VISIBLE_DEVICES of one device"
        )


def averaged(handle: Bridge, arrays: Sequence[jax.Array], step: jax.Array | None = None) -> tuple[list[Any], Any]:
    """Averages arrays in the order of ``handle.arrays``, in buffers of XLA's.

    Args:
        handle: Who averages.
        arrays: Of any real dtype.
        step: How many averages there were, to be compared with the handle's count; None for no comparison.

    Returns:
        The averages in the arrays' dtypes, and the next count, if one was given.
    """
    places = {each.name: place for place, each in enumerate(handle.arrays)}
    spans = [[(places[slot.name], slot.offset, slot.stop) for slot in unit.slots] for unit in handle.units]
    packed = [jnp.concatenate([arrays[p].astype(jnp.float32).reshape(-1) for p, _, _ in each]) for each in spans]
    given = [*packed, *([] if step is None else [step])]

    def in_place(context: Any, out: Sequence[Any], *inputs: Any) -> None:
        count = None if step is None else int(np.asarray(inputs[-1]))
        handle.average_buckets([torch.from_numpy(np.asarray(each)) for each in out[: len(packed)]], after=count)
        for each in out[len(packed) :]:
            np.asarray(each)[...] = handle.steps()

    call = buffer_callback(
        in_place,
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given],
        has_side_effect=True,
        input_output_aliases={index: index for index in range(len(given))},
    )
    back = call(*given)
    averages: list[Any] = [None] * len(arrays)
    for each, flat in zip(spans, back, strict=False):
        for place, start, stop in each:
            averages[place] = flat[start:stop].reshape(arrays[place].shape).astype(arrays[place].dtype)
    return averages, None if step is None else back[-1]
