"""1-bit Adam."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradwire.attach.synchronizer import Tensors
from gradwire.optim.adam import CompressedAdam
from gradwire.optim.groups import Group


class OneBitAdam(CompressedAdam):
    """1-bit Adam: after a warm-up of plain Adam the variance stands still, and compressed momenta are averaged.

    Tang et al. 2021, arXiv:2102.02888. For ``freeze_step`` steps gradients are averaged densely and Adam is plain Adam.
    From then on each worker adds its own gradient to the momentum, ``m = beta1 m + (1 - beta1) g``; the momenta are
    averaged by a method of the catalogue, as published by signs with error feedback at workers and owners; and all step
    along the average, ``x -= lr m / (sqrt(v) + eps)``.

    Held against the authors' code (DeepSpeed's ``OnebitAdam``), which corrects no bias of the moments, in neither
    phase; here both are corrected, as torch's Adam has it. It asks for a mask of coordinates whose momentum is always
    zero, which signs cannot send; here ``floor`` keeps what they are sent as from being divided by nothing.

    Arguments and errors are those of :class:`AveragingOptimizer`.

    Example:
        >>> optimizer = gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=500)
        >>> loss.backward(); optimizer.step()
    """

    def _step(self, gradients: Tensors) -> None:
        if self.steps < self.freeze_step:
            self._adam_step(gradients)
            return
        momenta = {
            name: self._next_momentum(group, gradients.get(name), state) for group, name, _, state in self._each()
        }
        averages = self._averaged(self._compressed, momenta)
        if averages is None:
            return
        for group, name, parameter, state in self._each():
            self._take(group, averages[name], state)
            self._descend(group, parameter, state)
        self.steps += 1

    def _take(self, group: Group, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Goes on from an averaged momentum."""
        state["exp_avg"].copy_(average)
