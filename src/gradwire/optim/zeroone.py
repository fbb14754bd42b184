"""0/1 Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gradwire.codec import Codec
from gradwire.memory import Memory
from gradwire.methods import Method
from gradwire.optim.adam import CompressedAdam, decay
from gradwire.train.configuration import FUSE_BYTES
from gradwire.train.policy import DensePolicy
from gradwire.train.synchronizer import Tensors


class ZeroOneAdam(CompressedAdam):
    """0/1 Adam: the variance is measured ever less often, and steps become local ones that are averaged now and then.

    Lu et al. 2022, arXiv:2202.06009, Algorithm 1. Each worker takes steps of its own along its own momentum and adds up
    ``u = sum(lr m)``. At a synchronisation ``u`` is averaged by a method of the catalogue, as published by signs with
    error feedback at workers and owners; all go from where they last met to ``x - u / (sqrt(v) + eps)``, and their
    momentum becomes ``u / sum(lr)``.

    Before ``freeze_step`` every step is synchronised, and the variance is measured on densely averaged gradients at
    steps k with ``k[j + 1] - k[j] = 2 ** (j // kappa)``. Such an average serves the momentum as well, as it does in the
    authors' public code, so it is a step of plain Adam. From ``freeze_step`` on the variance stands still, and
    synchronisations are 1 step apart at first; that doubles every ``double_every`` steps, up to ``max_interval``.

    Between synchronisations ranks have different parameters; :meth:`synchronize` makes them the same, such as before
    evaluation and at the end. A worker whose gradient is not finite in a local step sits that step out; at a
    synchronisation nobody takes it, and the next step synchronises.

    It averages by itself: use it on a plain model, or under ``model.no_sync()`` on one wrapped in DDP. Gradients may be
    accumulated over as many backward passes as you like. Clipping before a step clips each worker's own gradient.

    Args:
        params: Parameters, or ``net.named_parameters()``, or groups of either.
        freeze_step: Steps at first in which the variance is measured; the published choice is the warm-up of the
            learning rate.
        lr: Learning rate.
        betas: Decay of momentum and variance, a step, or a measurement of the variance.
        eps: Added to the root of the variance.
        weight_decay: Share of a parameter that is taken off it, times the learning rate, a step: AdamW's.
        floor: Least root of a variance that is not measured in every step, as a share of its mean over the parameter;
            0 as published.
        method: A name of ``gradwire.methods.names()`` or a method object.
        kappa: Measurements of the variance after which the steps between two of them double.
        double_every: Steps after which the steps between synchronisations double; the published choice is as often as
            the learning rate halves.
        max_interval: Most steps from one synchronisation to the next.
        process_group: The workers; all of them if None.
        granularity: As in :func:`gradwire.compress`; and so are the other arguments.
        route: See there.
        memory: See there; a memory that is momentum has no place here.
        owner: See there.
        dense: See there.
        seed: See there.
        fuse_bytes: See there.
        broadcast: Whether all ranks start from rank 0's parameters; otherwise they must be equal.
        **options: The method's hyper-parameters.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.

    Example:
        >>> optimizer = gradwire.optim.ZeroOneAdam(net.named_parameters(), freeze_step=500)  # doctest: +SKIP
        >>> loss.backward(); optimizer.step()                                                # doctest: +SKIP
    """

    state_names = (*CompressedAdam.state_names, "moved")
    counters = (*CompressedAdam.counters, "_measure_at", "_met_at")

    def __init__(
        self,
        params: Iterable[Any],
        freeze_step: int,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
        method: str | Method = "efsignsgd",
        *,
        kappa: int = 16,
        double_every: int = 32768,
        max_interval: int = 16,
        process_group: dist.ProcessGroup | None = None,
        granularity: str | None = None,
        route: str | None = None,
        memory: str | Memory | None = None,
        owner: str | Codec | None = None,
        dense: DensePolicy | None = None,
        seed: int = 0,
        fuse_bytes: int = FUSE_BYTES,
        broadcast: bool = False,
        **options: Any,
    ) -> None:
        self._freeze_step, self._kappa = freeze_step, kappa
        self._double_every, self._max_interval = double_every, max_interval
        self._measure_at = self._met_at = 0
        schedule = {
            "freeze_step": freeze_step,
            "kappa": kappa,
            "double_every": double_every,
            "max_interval": max_interval,
        }
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor},
            schedule,
            broadcast,
            process_group,
            method,
            fuse_bytes,
            granularity=granularity,
            route=route,
            memory=memory,
            owner=owner,
            dense=dense,
            seed=seed,
            **options,
        )
        for group in self.param_groups:
            group["rates"] = 0.0

    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages now how far workers have moved since they last met, so that all have the same parameters.

        Raises:
            WireError: If a collective fails; see :meth:`gradwire.Synchronizer.synchronize`.
            GradwireError: If an earlier step failed.
        """
        if self._met_at < self.steps:
            averages = self._compressed.average({name: state["moved"] for _, name, _, state in self._each()})
            if self._finite(averages):
                self._meet(averages)

    def _step(self, gradients: Tensors) -> None:
        if self.steps < self._freeze_step and self.steps == self._measure_at:
            if self._adam_step(gradients):
                self._measure_at += 2 ** ((self._measured - 1) // self._kappa)
                for _, _, parameter, state in self._each():
                    state["anchor"].copy_(parameter)
                self._met_at = self.steps
            return
        momenta, moved = {}, {}
        for group, name, _, state in self._each():
            momenta[name] = self._next_momentum(group, gradients.get(name), state)
            moved[name] = torch.add(state["moved"], momenta[name], alpha=self._rate(group))
        if self.steps + 1 - self._met_at < self._interval:
            self._step_alone(momenta, moved)
        else:
            self._step_together(moved)

    @property
    def _interval(self) -> int:
        """Steps from one synchronisation to the next, as things are now."""
        doublings = max(self.steps - self._freeze_step, 0) // self._double_every
        return min(1 << min(doublings, self._max_interval), self._max_interval)

    def _step_alone(self, momenta: Tensors, moved: Tensors) -> None:
        """A step along this worker's own momentum, unless that is not finite."""
        taken = all(bool(each.isfinite().all()) for each in moved.values())
        for group, name, parameter, state in self._each():
            decay(parameter, group)
            decay(state["anchor"], group)
            if taken:
                state["exp_avg"].copy_(momenta[name])
                state["moved"].copy_(moved[name])
                parameter.addcdiv_(momenta[name], self._root(group, state), value=-self._rate(group))
        self._count_step()

    def _step_together(self, moved: Tensors) -> None:
        """A step that is taken with all steps since the last synchronisation, as all workers together took them."""
        averages = self._compressed.average(moved)
        if not self._finite(averages):
            self.skipped += 1
            return
        for group, _, _, state in self._each():
            decay(state["anchor"], group)
        self._count_step()
        self._meet(averages)

    def _count_step(self) -> None:
        for group in self.param_groups:
            group["rates"] += self._rate(group)
        self.steps += 1

    def _meet(self, averages: Tensors) -> None:
        """Takes all workers to where they moved on average."""
        for group, name, parameter, state in self._each():
            moved = averages[name]
            state["anchor"].addcdiv_(moved, self._root(group, state), value=-1)
            parameter.copy_(state["anchor"])
            if group["rates"]:
                torch.div(moved, group["rates"], out=state["exp_avg"])
            state["moved"].zero_()
        for group in self.param_groups:
            group["rates"] = 0.0
        self._met_at = self.steps

    def _fresh(self, parameter: Parameter) -> dict[str, Tensor]:
        return {**super()._fresh(parameter), "anchor": parameter.detach().clone()}
