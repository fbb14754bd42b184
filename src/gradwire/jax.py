"""JAX: gradients are averaged, compressed, from within a compiled step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils.dlpack import from_dlpack

from gradwire.attach import elsewhere
from gradwire.attach.array_synchronizer import ArraySynchronizer
from gradwire.attach.elsewhere import Cell
from gradwire.engine import RECIPE, Methods
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.mirror import Mirror, Mirrored, mirrored

try:
    import jax
    import jax.numpy as jnp
    from jax import tree_util
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(f"{error}; JAX comes with pip install 'gradwire[jax]'") from error

_CONDITIONAL = {"apply_if_finite", "conditionally_mask", "conditionally_transform"}


class State(NamedTuple):
    """What travels in an optax state: how many averages there were, an ``int32``."""

    step: jax.Array


class Synchronizer(ArraySynchronizer):
    """Averages gradients shaped as ``params`` over all processes, within ``jax.jit`` or without.

    To be made on every rank with the same arguments; each process has one device. What the method remembers stays in
    the handle: save and restore it beside the parameters. All other arguments, options and what is raised are
    :class:`gradwire.Synchronizer`'s.

    Args:
        params: Any tree of arrays, the same values on all ranks; :func:`broadcast` makes them so.

    Example::

        sync = gradwire.jax.Synchronizer(params, "topk", ratio=0.01)
        optimizer = optax.chain(sync.transformation(), optax.adam(1e-3))
    """

    def __init__(self, params: Any, method: Methods = RECIPE, *, process_group: Any = None, **options: Any) -> None:
        def cells() -> list[Cell]:
            check_devices()
            given.append(_Leaves(params))
            return given[0].cells

        given: list[_Leaves] = []
        super().__init__(cells, method, process_group, options)
        self.check_equal(self.cells.values())
        given[0].tree()  # and lets go of its arrays

    def average(self, gradients: Any) -> Any:
        """The averages over all workers, with the structure and dtypes of ``gradients``.

        To be called as often on every rank. In a program that averages twice nothing but data orders the two; make the
        second depend on the first, or use :meth:`transformation`.

        Raises:
            ConfigurationError: If they are not shaped as the parameters, or are no real numbers of 16 to 64 bits.
            JaxRuntimeError: With the text of what failed, which :attr:`failed` keeps; where JAX waits for the result.
        """
        return self._average(gradients, -1)[0]

    def transformation(self) -> Any:
        """The average as an ``optax.GradientTransformation``, to be the first of a chain.

        Its state counts averages, which keeps them in order. A state that is not of as many as the handle has made
        raises in place of an average: parameters and handle were saved at different steps, or ``optax.MultiSteps``
        around it averages every small step. ``optax.apply_if_finite`` goes after it in the chain, with
        ``rollback=True`` for the synchronizer: around it ranks would decide each by itself, and it is refused.
        """
        import optax

        def update(updates: Any, state: State, params: Any = None) -> tuple[Any, State]:
            _check_around()
            averages, step = self._average(updates, state.step)
            return averages, State(step)

        return optax.GradientTransformation(lambda params: State(jnp.asarray(self.steps(), jnp.int32)), update)

    def _average(self, gradients: Any, step: Any) -> tuple[Any, Any]:
        # Their tree may differ from that of the parameters: flax.nnx gives bare arrays for its variables.
        leaves, tree = tree_util.tree_flatten(gradients)
        averages, step = averaged(self, self.named(leaves), step)
        return tree_util.tree_unflatten(tree, [averages[name] for name in self.cells]), step


class Periodic(Mirrored):
    """Parameters of local steps, averaged from time to time, as :class:`gradwire.Periodic`; see :func:`periodic`."""

    _leaves: _Leaves

    def step(self, params: Any = None, state: Any = ()) -> Any:
        """Parameters and state as they are given, or as averages leave them, where one is due.

        To be called after every local step, on every rank, between compiled steps, as it looks at values.

        Args:
            params: The parameters now.
            state: The optimizer's state now, of which ``moments="average"`` averages what is shaped as the parameters.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in tree_util.tree_leaves(params)):
            raise ConfigurationError("within jax.jit there are no values to average; call step between compiled steps")
        if due := self.due:
            self._leaves.take(params, state)
        super().step()
        return self._leaves.tree() if due else (params, state)

    def synchronize(self, params: Any = None, state: Any = ()) -> Any:
        """Parameters and state as :meth:`gradwire.Periodic.synchronize` leaves them."""
        self._leaves.take(params, state)
        super().synchronize()
        return self._leaves.tree()


def periodic(params: Any, **options: Any) -> Periodic:
    """Lets every worker take local steps, and averages parameters from time to time: local SGD, PQASGD, DiLoCo.

    To be called on every rank. There is no transformation for optax' chains: an update that takes each rank's own
    parameters to the average would round otherwise on each.

    Args:
        params: Any tree of arrays, the same values on all ranks; :func:`broadcast` makes them so.
        **options: Of :func:`gradwire.periodic`, and so is what is raised. ``moments="reset"``, ``broadcast`` and
            ``buffers`` are refused: average a tree of statistics by a handle of its own.
    """
    leaves = _Leaves(params, options.get("moments") == "average")

    def mirror() -> Mirror:
        if wrong := [name for name in ("broadcast", "buffers") if options.get(name)]:
            raise ConfigurationError(f"{wrong[0]} is not for trees; give params that gradwire.jax.broadcast made equal")
        return Mirror(leaves.cells, lambda place: leaves.moments[place])

    handle = mirrored(Periodic, mirror, options)
    handle._leaves = leaves
    return handle


def broadcast(tree: Any, process_group: Any = None) -> Any:
    """A tree of arrays as rank 0 has it; to be called on all ranks, with the same shapes and dtypes."""
    leaves = _Leaves(tree)
    elsewhere.broadcast(leaves.cells, process_group)
    return leaves.tree()


def init_process_group(**options: Any) -> None:
    """Starts ``torch.distributed`` among the processes of ``jax.distributed``, which find each other by its store.

    Under ``torchrun`` call ``torch.distributed.init_process_group("gloo")`` and leave ``jax.distributed`` alone.

    Args:
        **options: Of ``torch.distributed.init_process_group``, such as ``timeout``.

    Raises:
        ConfigurationError: If ``jax.distributed`` is not initialized.
    """
    try:  # tried with jax 0.10.2; no public name leads to this store, and collectives would need the network's address
        from jax._src.distributed import global_state as started

        client, address = started.client, started.coordinator_address
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"jax {jax.__version__} hides its store; start processes by torchrun") from error
    if client is None:
        raise ConfigurationError("jax.distributed is not initialized; call jax.distributed.initialize(...) first")
    rank, workers, key = started.process_id, started.num_processes, "gradwire/store"
    port = int(client.blocking_key_value_get(key, 300_000)) if rank else 0
    store = TCPStore(address.rpartition(":")[0], port, workers, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        client.key_value_set(key, str(store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, **options)


def check_devices() -> None:
    """Raises ConfigurationError unless this process has one device of JAX's."""
    elsewhere.check_one_device("JAX", jax.local_device_count(), "XLA_FLAGS=--xla_force_host_platform_device_count")


def _check_around() -> None:
    """Raises ConfigurationError within a transformation of optax' that calls those within it sometimes only."""
    ours = (frame for frame, _ in walk_stack(None) if frame.f_globals.get("__name__", "").startswith("optax."))
    if found := {frame.f_code.co_qualname.partition(".")[0] for frame in ours} & _CONDITIONAL:
        raise ConfigurationError(f"within optax.{found.pop()} not all ranks average; chain it after the average")


def averaged(handle: ArraySynchronizer, gradients: Mapping[str, Any], step: Any = -1) -> tuple[dict[str, Any], Any]:
    """Averages gradients by name in buckets of XLA's, from where they lie; a missing one counts as zero.

    ``step`` is how many averages there were, to be compared with the handle's count; -1 for no comparison. With the
    averages of all arrays, in the dtypes of their gradients, comes how many averages there are now.
    """
    given = {name: jnp.asarray(each) for name, each in gradients.items() if each is not None}
    names, kinds = list(given), handle.kinds({**gradients, **given})
    handle.barrier = jax.effects_barrier

    def on_host(context: Any, out: Sequence[Any], *arrays: Any) -> None:
        *values, before = (from_dlpack(each) for each in arrays)
        *buffers, now = (from_dlpack(each) for each in out)
        after = None if before < 0 else int(before)
        handle.average_arrays(buffers, dict(zip(names, values, strict=True)), kinds, after)
        now.fill_(handle.made())

    made = [jax.ShapeDtypeStruct((numel,), jnp.float32) for numel in handle.numels]
    call = buffer_callback(on_host, [*made, jax.ShapeDtypeStruct((), jnp.int32)], has_side_effect=True)
    *flats, now = call(*given.values(), jnp.asarray(step, jnp.int32))
    views = handle.views(flats)
    return {name: views[name].reshape(shape).astype(dtype) for name, (shape, dtype) in kinds.items()}, now


class _Leaves:
    """A tree's arrays, each of which can be read and replaced; of a tree of parameters also what an optimizer keeps.

    Args:
        tree: As it is at first.
        averaging: Whether moments are averaged.
    """

    def __init__(self, tree: Any, averaging: bool = False) -> None:
        named, self._structure = tree_util.tree_flatten_with_path(tree)
        self._params, self._averaging = self._structure, averaging
        self._values = [leaf for _, leaf in named]
        names = [tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in named]
        self.cells = [self._cell(place, name) for place, name in enumerate(names)]

    def _cell(self, at: int, name: str) -> Cell:
        dtype = jnp.result_type(self._values[at])  # of numbers and numpy's arrays not the one that numpy gives them
        kind = name, jnp.shape(self._values[at]), dtype.name
        return Cell(
            *kind, lambda: np.asarray(self._values[at], dtype), lambda to: self._values.__setitem__(at, jnp.asarray(to))
        )

    def tree(self) -> Any:
        """Gives back the tree as it is now."""
        values, self._values = self._values, []
        return tree_util.tree_unflatten(self._structure, values)

    def take(self, params: Any, state: Any) -> None:
        """Has parameters and an optimizer's state as they are now in place of the last, while averages are made."""

        def whole(node: Any) -> bool:
            return bool(tree_util.tree_structure(node) == self._params)

        given = [(jnp.shape(leaf), jnp.result_type(leaf).name) for leaf in tree_util.tree_leaves(params)]
        if given != [(cell.shape, cell.dtype) for cell in self.cells]:
            raise ConfigurationError("the parameters are of another tree than those that periodic was given; give its")
        self._values, self._structure = tree_util.tree_flatten((params, state))
        self.moments = [dict[str, Cell]() for _ in self.cells]
        places = itertools.count(len(self.cells))
        for path, node in tree_util.tree_flatten_with_path(state, whole)[0]:
            key = tree_util.keystr(path)
            kept = [self._cell(next(places), key) for _ in tree_util.tree_leaves(node)]
            if whole(node):
                for cell, own, moments in zip(self.cells, kept, self.moments, strict=True):
                    if own.shape == cell.shape and "float" in own.dtype:
                        moments[key] = own
            elif self._averaging and kept[0].shape and "float" in kept[0].dtype:
                raise ConfigurationError(f"the state's {key} belongs to no tree like params; choose moments='keep'")
        if self._averaging and not any(self.moments):
            raise ConfigurationError("the state has no moments to average; give step the state, or moments='keep'")
