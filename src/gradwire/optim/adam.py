"""Adam whose workers average by themselves: what its compressed forms have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.attach.synchronizer import Tensors
from gradwire.exact import magnitudes
from gradwire.optim.averaging import AveragingOptimizer
from gradwire.optim.groups import Group


class CompressedAdam(AveragingOptimizer):
    """Adam that takes each worker's own gradients and averages what its steps need.

    Weight decay is AdamW's, apart from the gradient. Moments are ``float32``, with torch's corrections of their bias.

    Compression gives every coordinate of a segment an error of about the same size, and a variance that is not measured
    any more may be far too small for the gradients to come; divided by its root, either ends a run where some
    coordinates hardly had gradients before, as behind units that were not active or in rows of an embedding that were
    not seen. So from the first step on in which the variance is not measured, its root is at least ``floor`` times its
    mean over the parameter, and a parameter without any variance stays where it is.

    Arguments and errors are those of :class:`AveragingOptimizer`.
    """

    @property
    def _frozen(self) -> bool:
        """Whether the step after ``steps`` does not measure the variance, or an earlier one did not."""
        return self._measured <= self.steps

    def _rate(self, group: Group) -> float:
        """The learning rate of the step after ``steps``, over the correction of the momentum's bias."""
        correction: float = 1 - group["betas"][0] ** (self.steps + 1)
        return float(group["lr"]) / correction

    def _root(self, group: Group, squares: Tensor, measured: int) -> Tensor:
        """What a momentum is divided by, from a variance that so many steps measured.

        Infinite where it is zero throughout, and not all steps measured it.
        """
        correction: float = 1 - group["betas"][1] ** measured
        root = torch.sqrt(squares).div_(correction**0.5)
        if self._frozen and root.numel():
            finite = root.flatten().nan_to_num(nan=0.0, posinf=0.0)  # of what has overflowed nothing else stands still
            mean = magnitudes(finite)[0].div(root.numel()).float()
            root.clamp_(min=torch.where(mean > 0, mean * group["floor"], torch.inf))
        return root.add_(group["eps"])

    def _next_momentum(self, group: Group, gradient: Tensor | None, state: Mapping[str, Tensor]) -> Tensor:
        """The momentum after this worker's gradient, a fresh tensor."""
        momentum, beta = state["exp_avg"], group["betas"][0]
        return momentum * beta if gradient is None else torch.lerp(momentum, gradient.float(), 1 - beta)

    def _adam_step(self, gradients: Tensors) -> bool:
        """A step of plain Adam on densely averaged gradients; whether it was taken."""
        self._exact.engine.begin(self.steps)  # whose random numbers, within nodes, are then a later run's, too
        averages = self._averaged(self._exact, gradients)
        if averages is None:
            return False
        self._measured += 1
        for group, name, parameter, state in self._each():
            average, (momentum_decay, variance_decay) = averages[name], group["betas"]
            state["exp_avg"].lerp_(average, 1 - momentum_decay)
            state["exp_avg_sq"].mul_(variance_decay).addcmul_(average, average, value=1 - variance_decay)
            self._descend(group, parameter, state)
        self.steps += 1
        return True

    def _descend(self, group: Group, parameter: Parameter, state: Mapping[str, Tensor]) -> None:
        """Moves a parameter by weight decay and along its momentum."""
        decay(parameter, group)
        parameter.addcdiv_(
            state["exp_avg"], self._root(group, state["exp_avg_sq"], self._measured), value=-self._rate(group)
        )


def decay(tensor: Tensor, group: Group) -> None:
    """Takes a step's weight decay off a tensor."""
    if group["weight_decay"]:
        tensor.mul_(1 - float(group["lr"]) * group["weight_decay"])
