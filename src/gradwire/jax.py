"""JAX: gradients are averaged, compressed, from within a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire import bridge
from gradwire.attach.elsewhere import Array, Described
from gradwire.bridge import Bridge, Saved
from gradwire.engine import Methods
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.mirror import Cell, Mirror, Mirrored, mirrored

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
        def arrays() -> list[Described]:
            check_devices()
            return _described(params)

        super().__init__(arrays, method, process_group, options)
        values = zip(self.arrays, jax.tree_util.tree_leaves(params), strict=True)
        self.check_equal((each.name, np.array(leaf)) for each, leaf in values)

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
        _check_shapes("gradients", leaves, self.arrays)
        averages, step = averaged(self, leaves, None if state is None else state.step)
        return jax.tree_util.tree_unflatten(tree, averages), None if step is None else State(step)


class Periodic(Saved, Mirrored):
    """Parameters of local steps, averaged from time to time, as :class:`gradwire.Periodic`; see :func:`periodic`."""

    hold: Callable[[Any, Any], Callable[[], Any]]

    def step(self, params: Any = None, state: Any = ()) -> Any:
        """To be called after every local step, on every rank, between compiled steps, as it looks at values.

        Args:
            params: The parameters now.
            state: The optimizer's state now, of which ``moments="average"`` averages what is shaped as the parameters.

        Returns:
            Both: as they were given, or as averages left them.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(params)):
            raise ConfigurationError("within jax.jit there are no values to average; call step between compiled steps")
        if self.due:
            given_back = self.hold(params, state)
            super().step()
            return given_back()
        super().step()
        return params, state

    def synchronize(self, params: Any = None, state: Any = ()) -> Any:
        """Parameters and state as :meth:`gradwire.Periodic.synchronize` leaves them."""
        given_back = self.hold(params, state)
        super().synchronize()
        return given_back()


def periodic(params: Any, **options: Any) -> Periodic:
    """Lets every worker take local steps, and averages parameters from time to time: local SGD, PQASGD, DiLoCo.

    To be called on every rank. There is no transformation for optax' chains: an update that takes each rank's own
    parameters to the average would round otherwise on each.

    Args:
        params: Any tree of arrays, the same values on all ranks; :func:`broadcast` makes them so.
        **options: Of :func:`gradwire.periodic`. ``moments="reset"``, ``broadcast`` and ``buffers`` are refused: average
            a tree of statistics by a handle of its own.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.

    Example::

        local = gradwire.jax.periodic(params, every=8, method="qsgd", bits=4)
        for batch in batches:
            params, state = local.step(*train_step(params, state, batch))
        params, state = local.synchronize(params, state)
    """
    leaves, tree = jax.tree_util.tree_flatten(params)
    arrays, moments = _described(params), [dict[str, Cell]() for _ in leaves]

    def cell(place: int, array: Described) -> Cell:
        def write(value: Array) -> None:
            leaves[place] = jnp.asarray(value)

        return Cell(array, lambda: np.asarray(leaves[place]), write)

    def hold(params: Any, state: Any) -> Callable[[], Any]:
        _check_shapes("parameters", jax.tree_util.tree_leaves(params), arrays)
        leaves[:], both = jax.tree_util.tree_flatten((params, state))
        nodes, _ = jax.tree_util.tree_flatten_with_path(state, lambda node: jax.tree_util.tree_structure(node) == tree)
        begin, all_moments = len(arrays), options.get("moments") == "average"
        for each in moments:
            each.clear()
        for path, node in nodes:
            found, key = _described(node), jax.tree_util.keystr(path)
            if jax.tree_util.tree_structure(node) == tree:
                for place, array in enumerate(found):
                    if array.shape == arrays[place].shape and "float" in array.dtype:
                        moments[place][key] = cell(begin + place, array)
            elif all_moments and found[0].shape and "float" in found[0].dtype:
                raise ConfigurationError(f"the state's {key} belongs to no tree like params; choose moments='keep'")
            begin += len(found)
        if all_moments and not any(moments):
            raise ConfigurationError("the state has no moments to average; give step the state, or moments='keep'")

        def given_back() -> Any:
            back = jax.tree_util.tree_unflatten(both, leaves)
            leaves.clear()
            return back

        return given_back

    def mirror() -> Mirror:
        if unknown := [name for name in ("broadcast", "buffers") if options.get(name)]:
            raise ConfigurationError(
                f"{unknown[0]} is not for trees; give params that gradwire.jax.broadcast made equal"
            )
        return Mirror([cell(place, array) for place, array in enumerate(arrays)], lambda place: moments[place])

    handle = mirrored(Periodic, mirror, options)
    handle.hold = hold
    return handle


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
    try:  # tried with jax 0.10.2; no public name leads to this store, and collectives would need the network's address
        from jax._src.distributed import global_state

        client, coordinator = global_state.client, global_state.coordinator_address
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"jax {jax.__version__} keeps the store of jax.distributed elsewhere; start the processes by torchrun, and "
            'call torch.distributed.init_process_group("gloo")'
        ) from error
    if client is None:
        raise ConfigurationError("jax.distributed is not initialized; call jax.distributed.initialize(...) first")
    rank, workers = global_state.process_id, global_state.num_processes
    host = coordinator.rpartition(":")[0]
    key, seconds = "gradwire/store", 300
    if rank == 0:
        store = TCPStore(host, 0, workers, is_master=True, wait_for_workers=False)
        client.key_value_set(key, str(store.port))
    else:
        port = int(client.blocking_key_value_get(key, seconds * 1000))
        store = TCPStore(host, port, workers, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, **options)


def _described(tree: Any) -> list[Described]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(jax.tree_util.keystr(path, simple=True, separator=".") or "params", leaf) for path, leaf in leaves]
    return [Described(name, tuple(jnp.shape(leaf)), jnp.result_type(leaf).name) for name, leaf in named]


def _check_shapes(given: str, leaves: Sequence[Any], arrays: Sequence[Described]) -> None:
    """Raises ConfigurationError unless there is an array of each shape, in this order."""
    found, wanted = [jnp.shape(leaf) for leaf in leaves], [each.shape for each in arrays]
    if found != wanted:
        place = next((p for p, (ours, theirs) in enumerate(zip(wanted, found, strict=False)) if ours != theirs), None)
        what = f"{len(found)} arrays" if place is None else f"shape {found[place]} for {arrays[place].name!r}"
        of = f"{len(wanted)} parameters" if place is None else f"a parameter of shape {wanted[place]}"
        raise ConfigurationError(
            f"the {given} have {what}; the synchronizer was made for {of}; give {given} of the same tree"
        )


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
