"""torchft: averages between replica groups that come and go, where a lost one costs a step and not the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from gradwire.attach.quorum import Averages
from gradwire.engine import Methods, Stats
from gradwire.errors import ConfigurationError, GradwireError
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
    committed is taken back. When groups come or go, what the others owe is conserved, and goes along with their next
    gradients; factors and estimates begin anew. A group that was healed owes nothing.

    Without, every average that the manager is asked for is compressed, as torchft's ``DistributedDataParallel``,
    ``LocalSGD`` and ``DiLoCo`` ask. Their tensors have no names to remember anything by, so methods without bias and
    memory serve: ``"qsgd"``, ``"nuqsgd"``, ``"natural"``, ``"terngrad"``, ``"bf16"``.

    Args:
        manager: With a ``ProcessGroupGloo``; before its first quorum, on every rank of every group.
        method: See :func:`gradwire.compress`; not ``"auto"``.
        parameters: A module, or names and parameters, whose gradients are averaged.
        **options: See :func:`gradwire.compress`, but for ``inside``.

    Raises:
        ConfigurationError: If anything cannot be as asked; nothing is changed. When groups meet, if they differ.

    Example::

        averages = gradwire.integrations.torchft.compress(manager, "topk", ratio=0.01, parameters=model)
        optimizer.zero_grad()  # torchft.Optimizer, which looks who is there
        loss.backward(); averages.synchronize(); optimizer.step()
    """
    pg = manager._pg if isinstance(manager, Manager) else manager
    if not isinstance(pg, ProcessGroupGloo):
        raise ConfigurationError(
            f"manager is or has a {type(pg).__name__}; give a torchft.Manager with pg=torchft.ProcessGroupGloo()"
        )
    if "gradwire" in manager._user_state_dicts:
        raise ConfigurationError("the manager has a method of gradwire's already; compress once a manager")
    managed = Managed(manager, averages := Averages(method, options, parameters))
    manager.register_state_dict_fn("gradwire", averages.heal, dict)
    if parameters is None:
        manager.allreduce = managed._allreduce
    return managed


class Managed:
    """What :func:`compress` gives back."""

    def __init__(self, manager: Manager, averages: Averages) -> None:
        self._manager, self._averages, self._theirs = manager, averages, manager.allreduce

    def stats(self) -> Stats:
        """What this worker counted, over all quorums."""
        return self._averages.stats()

    def synchronize(self) -> None:
        """Replaces every parameter's ``grad`` by its average over those who take part; a missing one counts as zero.

        What fails on the way is told to the manager, so that ``should_commit`` is False.

        Raises:
            ConfigurationError: If no quorum was begun; or if a gradient is sparse, or replica groups differ.
        """
        with self._telling():
            if self._meet():
                self._averages.synchronize(self._manager.is_participating())

    def close(self) -> None:
        """Averages nothing any more; the manager's own averages are dense again."""
        self._averages.close()
        self._manager.allreduce = self._theirs

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except ConfigurationError:
            raise
        except GradwireError as error:
            self._manager.report_error(error)

    def _meet(self) -> bool:
        """Waits for the quorum; whether there is one."""
        manager = self._manager
        if manager._quorum_future is None:
            raise ConfigurationError("no quorum was begun; call manager.start_quorum(), or its optimizer's zero_grad()")
        manager.wait_quorum()
        if manager.errored() is not None:
            return False
        self._averages.meet(manager._pg.parent, manager.num_participants(), manager.current_step(), manager._timeout)
        return True

    def _allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Any:
        """In place of the manager's own, which does what is no average."""
        if reduce_op != ReduceOp.AVG:
            self._averages.settle()
            return self._theirs(tensor, should_quantize, reduce_op)
        with self._telling():
            if self._manager.errored() is None and self._meet():
                if not self._manager.is_participating():
                    tensor.zero_()
                return _ManagedWork(self._manager, _Arriving(self, self._averages.average(tensor)), tensor)
        return _DummyWork(tensor)


class _Arriving(dist.Work):
    """An average on its way; waiting for the first of a step sends what all of them have left."""

    def __init__(self, managed: Managed, landed: TensorFuture) -> None:
        super().__init__()
        self._managed, self._landed = managed, landed

    def wait(self, timeout: object = None) -> bool:
        """Tells the manager what fails, here: torchft's DDP takes the future all the same."""
        with self._managed._telling():
            self._managed._averages.wait(self._landed)
        return True

    def get_future(self) -> TensorFuture:
        """Holds the tensor, whatever failed."""
        return self._landed
