"""torchft: averages between replica groups that come and go, where a lost one costs a step and not the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from gradwire.attach.given import check_named, check_parameters
from gradwire.attach.shards import is_sharded
from gradwire.engine import Methods, Stats
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import Settled, configure
from gradwire.engine.policy import DensePolicy
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.integrations.quorum import Averages
from gradwire.memory import NoMemory
from gradwire.wire.wire import TensorFuture

try:
    from torchft.manager import Manager, _ManagedWork
    from torchft.process_group import ProcessGroupGloo
    from torchft.work import _DummyWork
except ImportError as error:
    raise ImportError(f"{error}; torchft comes with pip install 'gradwire[torchft]'") from error


def compress(
    manager: Manager,
    method: Methods,
    *,
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]] | None = None,
    **options: Any,
) -> Managed:
    """Averages between replica groups through a compression method, among whoever is there in each step.

    With ``parameters`` any method works, and :meth:`Managed.synchronize` averages their gradients. A step that is not
    committed is taken back. When replica groups come or go, what the others owe to the model is conserved: it goes
    along with their next gradients; factors and estimates begin anew. A group that had to be healed owes nothing.

    Without, every average that the manager is asked for is compressed, as torchft's ``DistributedDataParallel``,
    ``LocalSGD`` and ``DiLoCo`` do it. Their tensors have no names under which anything could be remembered, so methods
    without bias and memory serve: ``"qsgd"``, ``"nuqsgd"``, ``"natural"``, ``"terngrad"``, ``"bf16"``.

    Args:
        manager: With a ``ProcessGroupGloo``; before its first quorum, on every rank of every group.
        method: See :func:`gradwire.compress`; ``"auto"`` chooses among workers that stay, so give another.
        parameters: A module, or names and parameters, whose gradients are averaged.
        **options: See :func:`gradwire.compress`, but for ``inside``.

    Returns:
        Counters, and :meth:`Managed.synchronize`.

    Raises:
        ConfigurationError: If anything cannot be as asked; nothing is changed. When groups meet, if they differ.

    Example::

        averages = gradwire.integrations.torchft.compress(manager, "topk", ratio=0.01, parameters=model)
        optimizer.zero_grad()  # torchft.Optimizer, which looks who is there
        loss.backward(); averages.synchronize(); optimizer.step()
    """
    if not isinstance(manager, Manager) or not isinstance(manager._pg, ProcessGroupGloo):
        given = (
            f"a Manager of {type(manager._pg).__name__}"
            if isinstance(manager, Manager)
            else f"a {type(manager).__name__}"
        )
        raise ConfigurationError(f"manager is {given}; give a torchft.Manager with pg=torchft.ProcessGroupGloo()")
    if "gradwire" in manager._user_state_dicts:
        raise ConfigurationError("the manager has a method of gradwire's already; compress once a manager")
    chosen = {each.name: options.pop(each.name) for each in fields(Choices) if each.name in options}
    if parameters is None:
        chosen.setdefault("dense", DensePolicy(vectors=False))  # DDP's buckets are vectors
    choices = Choices(**chosen)
    configuration = configure(method, options, choices)
    if not isinstance(configuration, Settled) or choices.inside is not None:
        raise ConfigurationError("method='auto' and inside= are for workers that stay; leave them out")
    if parameters is None:
        _check_nameless(configuration)
    given = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters or ()
    named = [(name, each) for name, each in check_named(given) if each.requires_grad]
    if parameters is not None:
        check_parameters(named)
        if any(is_sharded(each) or each.device.type != "cpu" for _, each in named):
            raise ConfigurationError("there are DTensors or parameters on a GPU, which were not tried under torchft")
    guarding = Guarding(choices)
    guarding.check(configuration)
    managed = Managed(manager, Averages(configuration, guarding, named))
    manager.register_state_dict_fn("gradwire", managed._heal, dict)
    if parameters is None:
        manager.allreduce = managed._allreduce
    return managed


def _check_nameless(configuration: Settled) -> None:
    alone = configuration if isinstance(configuration, Configuration) else None
    if alone is None or not isinstance(alone.memory, NoMemory) or alone.method.bias not in ("exact", "unbiased"):
        raise ConfigurationError(
            f"{configuration} remembers by parameter, and the tensors that torchft averages have no names; give "
            "parameters=model and call synchronize(), or choose qsgd, nuqsgd, natural, terngrad or bf16"
        )


class Managed:
    """What :func:`compress` gives back."""

    def __init__(self, manager: Manager, averages: Averages) -> None:
        self._manager = manager
        self._averages = averages
        self._theirs = manager.allreduce

    def stats(self) -> Stats:
        """What this worker counted, over all quorums."""
        return self._averages.stats()

    def synchronize(self) -> None:
        """Replaces the ``grad`` of every parameter by its average over those who take part; a missing one is zero.

        Whatever fails on the way is told to the manager, as torchft's own averages do: ``should_commit`` is False then.

        Raises:
            ConfigurationError: If no quorum was begun; or if a gradient is sparse, or replica groups differ.
        """
        if self._meet():
            try:
                self._averages.synchronize(self._manager.is_participating())
            except ConfigurationError:
                raise
            except GradwireError as error:
                self._manager.report_error(error)

    def close(self) -> None:
        """Averages nothing any more; the manager's own averages are dense again."""
        self._averages.close()
        self._manager.allreduce = self._theirs

    def _meet(self) -> bool:
        """Waits for the quorum; whether there is one that this worker can average in."""
        manager = self._manager
        if manager._quorum_future is None:
            raise ConfigurationError(
                "no quorum was begun; call manager.start_quorum(), or zero_grad() of torchft.Optimizer, before"
            )
        manager.wait_quorum()
        if manager.errored() is not None:
            return False
        try:
            self._averages.meet(
                manager._pg.parent, manager.num_participants(), manager.current_step(), manager._timeout
            )
        except ConfigurationError:
            raise
        except GradwireError as error:
            manager.report_error(error)
            return False
        return True

    def _heal(self, state: object) -> None:
        self._averages.healed = True

    def _allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> dist.Work:
        """In place of the manager's own, which takes whatever is no average."""
        if reduce_op != ReduceOp.AVG:
            self._averages.settle()
            return self._theirs(tensor, should_quantize, reduce_op)
        if self._manager.errored() is not None or not self._meet():
            return _DummyWork(tensor)
        if not self._manager.is_participating():
            tensor.zero_()
        return _ManagedWork(self._manager, _Arriving(self, self._averages.average(tensor)), tensor)


class _Arriving(dist._Work):
    """An average on its way; waiting for the first of a step sends what all of them have left."""

    def __init__(self, managed: Managed, landed: TensorFuture) -> None:
        super().__init__()
        self._managed, self._landed = managed, landed

    def wait(self, timeout: object = None) -> bool:
        """What fails is told to the manager here: torchft's DDP takes the future for one that was made all the same."""
        try:
            self._managed._averages.wait(self._landed)
        except GradwireError as error:
            self._managed._manager.report_error(error)
        return True

    def get_future(self) -> TensorFuture:
        """Holds the tensor, whatever failed."""
        return self._landed
