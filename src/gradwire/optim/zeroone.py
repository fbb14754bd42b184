"""0/1 Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from gradwire.attach.synchronizer import Tensors
from gradwire.methods import Method
from gradwire.optim.adam import CompressedAdam, decay
from gradwire.optim.averaging import SIGNS


class ZeroOneAdam(CompressedAdam):
    """0/1 Adam: the variance is measured ever less often, and steps become local ones that are averaged now and then.

    Lu et al. 2022, arXiv:2202.06009, Algorithm 1. Each worker takes steps of its own along its own momentum and adds up
    ``u = sum(lr m)``. At a synchronisation ``u`` is averaged by a method of the catalogue, as published by signs with
    error feedback at workers and owners; all go from where they last met to ``x - u / (sqrt(v) + eps)``, and their
    momentum becomes ``u / sum(lr)``.

    Before ``freeze_step`` every step is synchronised, and the variance is measured on densely averaged gradients at
    steps k with ``k[j + 1] - k[j] = 2 ** (j // kappa)``. Such an average serves the momentum as well, as it does in the
    authors' public code, so it is a step of plain Adam. In other steps that code averages gradients by signs, not
    ``u``, and it forgets what is owed at the freeze and with a checkpoint; here nothing is forgotten. In other steps
    with a learning rate of 0 a momentum stays as it is, for nothing of it would be sent. From ``freeze_step`` on the
    variance stands still, and synchronisations are 1 step apart at first; that doubles every ``double_every`` steps, up
    to ``max_interval``.

    Between synchronisations ranks have different parameters; :meth:`synchronize` makes them the same, such as before
    evaluation and at the end. A worker whose gradient is not finite in a local step sits that step out; at a
    synchronisation nobody takes it, and the next step synchronises.

    Further arguments, and errors, are those of :class:`AveragingOptimizer`.

    Args:
        params: See there.
        freeze_step: See there, as for all up to ``method``; the published choice is the warm-up of the learning rate.
        kappa: Measurements of the variance after which the steps between two of them double.
        double_every: Steps after which the steps between synchronisations double; the published choice is as often as
            the learning rate halves.
        max_interval: Most steps from one synchronisation to the next.

    Example:
        >>> optimizer = gradwire.optim.ZeroOneAdam(net.named_parameters(), freeze_step=500)
        >>> loss.backward(); optimizer.step()
    """

    schedule = (*CompressedAdam.schedule, "kappa", "double_every", "max_interval")
    state_names = (*CompressedAdam.state_names, "moved")
    counters = (*CompressedAdam.counters, "_measure_at", "_met_at")
    refused: Mapping[str, str] = {
        **CompressedAdam.refused,
        "clip_spikes": "steps are longer where the learning rate is larger or workers met long ago, and no spikes",
    }

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
        kappa: int = 16,
        double_every: int = 32768,
        max_interval: int = 16,
        **others: Any,
    ) -> None:
        self.kappa, self.double_every, self.max_interval = kappa, double_every, max_interval
        self._measure_at = self._met_at = 0
        super().__init__(params, freeze_step, lr, betas, eps, weight_decay, floor, method, **others)
        for group in self.param_groups:
            group["rates"] = 0.0

    @_disable_dynamo
    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages now how far workers have moved since they last met, so that all have the same parameters.

        Raises:
            WireError: If a collective fails; see :meth:`gradwire.Synchronizer.synchronize`.
            GradwireError: If an earlier step failed.
        """
        if self._met_at < self.steps:
            with self._compressed.wire.whole():
                averages = self._compressed.average({name: state["moved"] for _, name, _, state in self._each()})
                if self._finite(averages):
                    self._meet(averages)

    def _step(self, gradients: Tensors) -> None:
        if self.steps < self.freeze_step and self.steps == self._measure_at:
            if self._adam_step(gradients):
                self._measure_at += 2 ** ((self._measured - 1) // self.kappa)
                for _, _, parameter, state in self._each():
                    state["anchor"].copy_(parameter)
                self._met_at = self.steps
            return
        momenta, moved = {}, {}
        for group, name, _, state in self._each():
            rate, kept = self._rate(group), state["exp_avg"]
            momenta[name] = self._next_momentum(group, gradients.get(name), state) if rate else kept
            moved[name] = torch.add(state["moved"], momenta[name], alpha=rate)
        if self.steps + 1 - self._met_at < self._interval:
            self._step_alone(momenta, moved)
        else:
            self._step_together(moved)

    @property
    def _interval(self) -> int:
        """Steps from one synchronisation to the next, as things are now."""
        doublings = max(self.steps - self.freeze_step, 0) // self.double_every
        return min(1 << min(doublings, self.max_interval), self.max_interval)

    def _step_alone(self, momenta: Tensors, moved: Tensors) -> None:
        """A step along this worker's own momentum, unless that is not finite."""
        taken = all(bool(each.isfinite().all()) for each in moved.values())
        for group, name, parameter, state in self._each():
            decay(state["anchor"], group)
            if taken:
                state["exp_avg"].copy_(momenta[name])
                state["moved"].copy_(moved[name])
                self._descend(group, parameter, state)
            else:
                decay(parameter, group)
        self._count_step()

    def _step_together(self, moved: Tensors) -> None:
        """A step that is taken with all steps since the last synchronisation, as all workers together took them."""
        averages = self._averaged(self._compressed, moved)
        if averages is None:
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
            state["anchor"].addcdiv_(moved, self._root(group, state["exp_avg_sq"], self._measured), value=-1)
            parameter.copy_(state["anchor"])
            if group["rates"]:
                torch.div(moved, group["rates"], out=state["exp_avg"])
            state["moved"].zero_()
        for group in self.param_groups:
            group["rates"] = 0.0
        self._met_at = self.steps

    def _fresh(self, parameter: Parameter) -> dict[str, Tensor]:
        return {**super()._fresh(parameter), "anchor": parameter.detach().clone()}
