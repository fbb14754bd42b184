"""Optimizers whose workers average by themselves: what they are given, count, save and refuse."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire.attach.given import check_parameters, default_group, named_by
from gradwire.attach.roll_call import RollCall
from gradwire.attach.shards import is_sharded
from gradwire.attach.synchronizer import Synchronizer, Tensors, check_dense
from gradwire.attach.tree import Trained
from gradwire.attach.twice import check_not_averaged
from gradwire.attach.uncopied import Uncopied
from gradwire.codecs.codec import Codec
from gradwire.engine.agreement import check_equal, check_same
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.stats import Stats
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.start import REMEDY, send_first
from gradwire.memory import MaskedMomentum, Memory, Momentum
from gradwire.methods import EFSignSGD, Method, name_of
from gradwire.methods.registry import CHOICES
from gradwire.optim.groups import Group, described, make_valid
from gradwire.plain import plain
from gradwire.policy import DensePolicy
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import transport_for

SIGNS = EFSignSGD(norm="l2")
"""How momenta are sent as published: ``(|m|_2 / sqrt(d)) sign(m)``, with error feedback at workers and owners."""

UNNAMED = "a method's options go with its name, as in method='efsignsgd', norm='l1'"

VERSION = 1
"""Raised whenever the form of ``state_dict()["gradwire"]`` changes."""


class AveragingOptimizer(Uncopied, Optimizer):
    """Takes each worker's own gradients and averages what its steps need.

    To be made on every rank with the same arguments; the parameters must be equal on all ranks. Gradients are left as
    they are; a missing one counts as zero.

    It averages by itself: use it on a plain model, or under ``model.no_sync()`` on one wrapped in DDP. Gradients may be
    accumulated over as many backward passes as you like. Clipping before a step clips each worker's own gradient.

    Args:
        params: Parameters, or ``net.named_parameters()``, or groups of either.
        freeze_step: Steps at first in which the variance is measured: the published advice is the warm-up of the
            learning rate, or for 1-bit Adam 15 to 20 per cent of the run, and until every row of an embedding has been
            seen.
        lr: Learning rate. All hyper-parameters are compared over ranks when the optimizer is made; what becomes of them
            later, as by a schedule, must be the same on all ranks, too, and is not compared.
        betas: Decay of momentum and variance, a step; of the variance, a step that measures it.
        eps: Added to the root of the variance.
        weight_decay: Share of a parameter that is taken off it, times the learning rate, a step: AdamW's.
        floor: Least root of a variance that is not measured in every step, as a share of its mean over the parameter;
            0 as published.
        method: A name of ``gradwire.methods.names()`` or a method object: how what is sent is compressed; as published
            ``"efsignsgd", norm="l2"``.
        process_group: The workers, also as a device mesh of one dimension; all of them if None.
        granularity: As in :func:`gradwire.compress`; and so are the other arguments.
        route: See there.
        memory: See there; a memory that is momentum has no place here.
        owner: See there.
        dense: See there.
        seed: See there.
        fuse_bytes: See there.
        inside: See there.
        name: See there.
        broadcast: Whether all ranks start from rank 0's parameters; otherwise they must be equal.
        **options: The method's hyper-parameters.

    Attributes:
        process_group: The workers.
        steps: Steps taken.
        skipped: Steps that nobody took, because what was averaged was not finite.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.
    """

    _step_supports_amp_scaling = True
    """Lets ``GradScaler`` hand over its scale and leave it to us whether a step is taken, which ranks must agree on."""

    schedule: tuple[str, ...] = ("freeze_step",)
    """Whole numbers that say when what is sent."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """What is kept of every parameter."""

    counters: tuple[str, ...] = ("steps", "skipped", "_measured")
    """What is counted."""

    refused: Mapping[str, str] = {
        "grad_scaler": "a scaler's step divides gradients before this optimizer sees them",
        "rollback": "memories always go back where a step is bad",
        "learning_rate": "what is not sent of a momentum goes on in the momentum, at the rates to come",
    }
    """What a :class:`gradwire.Synchronizer` can be given and this cannot, and why."""

    _attached = False

    @as_on_the_wire()
    def __init__(
        self,
        params: Iterable[Any],
        freeze_step: int,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
        method: str | Method = SIGNS,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        granularity: str | None = None,
        route: str | None = None,
        memory: str | Memory | None = None,
        owner: str | Codec | None = None,
        dense: DensePolicy | None = None,
        seed: int = 0,
        fuse_bytes: int = FUSE_BYTES,
        inside: int | str | None = None,
        name: str | None = None,
        broadcast: bool = False,
        **options: Any,
    ) -> None:
        choices = replace(Choices.of(locals()), rollback=True)
        self.freeze_step = freeze_step
        workers = self.process_group = default_group(process_group)
        with RollCall(workers) as roll_call:
            self._make_valid()
            for each in options:
                if why := self.refused.get(each, UNNAMED if method is SIGNS and each not in CHOICES else ""):
                    raise ConfigurationError(f"{each} is no option of {type(self).__name__}: {why}; leave it out")
            self.steps = self.skipped = self._measured = self._calls = 0
            defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor}
            super().__init__(params, defaults)
            named = [(name, each) for name, each in named_by(self) if each.requires_grad]
            check_parameters(named)
            self._trained = Trained(self)
            for name, parameter in named:
                if is_sharded(parameter):
                    raise ConfigurationError(
                        f"parameter {name!r} is a DTensor, which these optimizers cannot step; give "
                        "nn.Parameter(parameter.to_local()), and the group of its replicas"
                    )
            roll_call.ready()
        transport = transport_for(workers, named[0][1].device)
        lines = [f"{key}={value}" for key, value in self._describe().items()]
        lines += [f"group {number} {described(group)}" for number, group in enumerate(self.param_groups)]
        lines += [f"parameter {name} with shape {tuple(parameter.shape)}" for name, parameter in named]
        lines.append(f"broadcast={bool(broadcast)}")
        check_same(lines, transport, named[0][1].device)
        if broadcast:
            send_first(named, transport)
        else:
            check_equal(named, transport, named[0][1].device, REMEDY)
        self._compressed = Synchronizer(named, method, process_group=workers, **choices.arguments(), **options)
        self._exact = self._compressed
        try:
            for rule in self._compressed.configuration.rules:
                if isinstance(rule.memory, Momentum | MaskedMomentum):
                    raise ConfigurationError(
                        f"memory={rule.memory} is momentum of gradients, and what is sent here is momentum already; "
                        "choose memory='residual' or 'none'"
                    )
                if rule.method.why_no_mean:
                    raise ConfigurationError(
                        f"averages of {name_of(rule.method)} are no means of what is sent here, because "
                        f"{rule.method.why_no_mean}; choose a method whose averages are, such as 'efsignsgd'"
                    )
            self._exact = Synchronizer(named, "dense", process_group=workers, fuse_bytes=fuse_bytes, inside=inside)
        except Exception:
            self.close()
            raise
        self._names = {parameter: name for name, parameter in named}
        self._dense_bytes = self._exact.engine.dense_bytes(sum(parameter.nbytes for _, parameter in named))
        for _, parameter in named:
            self.state[parameter] = self._fresh(parameter)
        self._attached = True

    def add_param_group(self, param_group: Group) -> None:
        """Refused once the optimizer is made; until then as torch has it.

        Raises:
            ConfigurationError: If a hyper-parameter is out of range, or the optimizer is made already.
        """
        if self._attached:
            raise ConfigurationError("a parameter group was added after averages began; make it with all parameters")
        super().add_param_group(param_group)
        make_valid(self.param_groups[-1])

    @_disable_dynamo  # which loses what is counted
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step, together with all other workers; to be called on every rank alike.

        If what is averaged is not finite, because any worker's gradient was not, nobody takes the step, and everything
        is as it was before.

        Args:
            closure: Evaluates the model once more, if given, and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigurationError: If a gradient is sparse or averaged already, or a parameter is frozen that was not when
                the optimizer was made, or the other way round; nothing is changed.
            WireError: If a collective fails; see :meth:`gradwire.Synchronizer.synchronize`.
            GradwireError: If an earlier step failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        with self._compressed.wire.whole(), self._exact.wire.whole():  # a step in part is no step, either
            self._step(gradients)
        self._calls += 1
        return loss

    def stats(self) -> Stats:
        """Totals of this rank since the optimizer was made: ``steps`` are calls of :meth:`step`.

        ``dense_bytes`` is what a dense all-reduce of the gradients in each of them would have handed over.
        """
        exact, compressed = self._exact.stats(), self._compressed.stats()
        return replace(
            compressed,
            steps=self._calls,
            dense_bytes=self._calls * self._dense_bytes,
            wire_bytes=exact.wire_bytes + compressed.wire_bytes,
            seconds={stage: seconds + exact.seconds[stage] for stage, seconds in compressed.seconds.items()},
            node_bytes=exact.node_bytes + compressed.node_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, with the compression's memory and what is counted under ``"gradwire"``.

        Every rank has its own; save it on each. ``torch.load(weights_only=True)`` reads it, and a run that goes on from
        it gives the same bits as one that was not stopped. :class:`gradwire.PerRank` is for
        ``torch.distributed.checkpoint``, whose ``get_optimizer_state_dict`` leaves ``"gradwire"`` out, so that nothing
        could go on from it; :func:`gradwire.redistribute` is for another number of workers.
        """
        return {
            **super().state_dict(),
            "gradwire": {
                "version": VERSION,
                "choices": self._describe(),
                "counters": {name: getattr(self, name) for name in self.counters},
                "compression": self._compressed.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken.

        Raises:
            ConfigurationError: If the state is of another optimizer, schedule, method, model, rank or number of
                workers; nothing is changed.
        """
        saved = state_dict.get("gradwire")
        if saved is None:
            raise ConfigurationError(
                f"the state has no part named 'gradwire': no {type(self).__name__} saved it, or it came through "
                "torch's get_optimizer_state_dict, which leaves that out; save optimizer.state_dict() on every rank, "
                "or gradwire.PerRank(optimizer)"
            )
        kept = self._by_name(state_dict)
        if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
            raise ConfigurationError(
                f"the state is not one that {type(self).__name__} of this version of gradwire saved; load it where it "
                "was saved"
            )
        for key, value in self._describe().items():
            if saved["choices"].get(key) != value:
                raise ConfigurationError(
                    f"the state was saved with {key}={saved['choices'].get(key)!r}, this optimizer has {key}={value!r};"
                    " make it with the same"
                )
        for name, parameter in self._named():
            for key, ours in self.state[parameter].items():
                theirs = kept.get(name, {}).get(key)
                if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
                    raise ConfigurationError(
                        f"the state has {_shape(theirs)} for {key} of {name!r}, this optimizer {_shape(ours)}; load a "
                        "state saved from the same model"
                    )
        self._compressed.load_state_dict(saved["compression"])
        state = dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": copy.deepcopy(state_dict["param_groups"])})
        for name, parameter in self._named():
            for key, ours in state[parameter].items():
                ours.copy_(kept[name][key])
            self.state[parameter] = state[parameter]
        for name in self.counters:
            setattr(self, name, saved["counters"][name])

    def close(self) -> None:
        """Ends the threads and process groups of the averages; no step can be taken any more."""
        self._compressed.close()
        self._exact.close()

    def _make_valid(self) -> None:
        """Makes what it was given, beside hyper-parameters of groups, valid.

        Raises:
            ConfigurationError: If anything is out of range.
        """
        for name in self.schedule:
            value = plain(getattr(self, name))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name}={value!r} is out of range; choose a whole number >= 1")
            setattr(self, name, value)

    def _step(self, gradients: Tensors) -> None:
        """Takes a step."""
        raise NotImplementedError

    def _describe(self) -> dict[str, str]:
        """Everything but hyper-parameters of groups that must be the same on all ranks, as text."""
        return {"optimizer": type(self).__name__, **{name: str(getattr(self, name)) for name in self.schedule}}

    def _fresh(self, parameter: Parameter) -> dict[str, Tensor]:
        """What is kept of a parameter before the first step."""
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in self.state_names}

    def _by_name(self, state_dict: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """What a saved state keeps of each parameter, which it numbers.

        Raises:
            ConfigurationError: If it has other groups.
        """
        ours = [group["params"] for group in self.param_groups]
        theirs = [group["params"] for group in state_dict["param_groups"]]
        sizes = [[len(each) for each in groups] for groups in (theirs, ours)]
        if sizes[0] != sizes[1]:
            raise ConfigurationError(
                f"the state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}; load a state saved from "
                "the same model"
            )
        pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
        return {self._names[each]: state_dict["state"].get(key, {}) for each, key in pairs if each in self._names}

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for parameter, name in self._names.items():
            yield name, parameter

    def _each(self) -> Iterator[tuple[Group, str, Parameter, dict[str, Tensor]]]:
        """Every parameter that is trained, with its group, name and state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._names:
                    yield group, self._names[parameter], parameter, self.state[parameter]

    def _gradients(self) -> Tensors:
        """This worker's gradients by name, without the scale of the loss."""
        self._trained.check(moved=True)
        found = {name: each.grad for name, each in self._named() if each.grad is not None}
        check_dense(found)
        check_not_averaged(self._compressed, self._named(), found)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return found if scale is None else {name: each.float() / scale for name, each in found.items()}

    def _averaged(self, synchronizer: Synchronizer, tensors: Tensors) -> Tensors | None:
        """Averages for a step; None if they are not finite, so that nobody is to take it."""
        averages = synchronizer.average(tensors)
        if self._finite(averages):
            return averages
        self.skipped += 1
        return None

    def _finite(self, averages: Tensors) -> bool:
        """Whether averages are finite, which all ranks see alike; as the rollback of the compression's memory asks."""
        ends = [
            torch.stack(torch.aminmax(averages[name])).to(each.dtype).isfinite().all()
            for name, each in self._named()
            if each.numel()
        ]
        return not ends or bool(torch.stack(ends).all())


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "nothing"
