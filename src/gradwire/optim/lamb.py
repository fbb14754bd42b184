"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import ConfigurationError
from gradwire.exact import length
from gradwire.optim.groups import Group
from gradwire.optim.onebit import OneBitAdam
from gradwire.plain import number, plain


class OneBitLamb(OneBitAdam):
    """1-bit LAMB: after a warm-up of plain LAMB each layer's learning rate follows the variance that is not used.

    Li et al. 2021, arXiv:2104.06069. For ``freeze_step`` steps gradients are averaged densely, and a layer moves along
    ``u = m / (sqrt(v) + eps) + weight_decay x`` by ``lr c``, with ``c = |x| / |u|`` bounded by ``trust``. From then on
    the variance stands still and compressed momenta are averaged, as with :class:`OneBitAdam`. A layer moves by ``lr
    mean(c) r``, with the moving average of ``c`` from the warm-up. ``r`` is how much larger the root of the variance is
    at most than that of one which goes on with the gradients that the averaged momenta stand for; less weight decay's
    share of ``u``, and bounded by ``factors`` and, from one step to the next, by ``change``.

    The paper scales layers' momenta to one size first, since a single scale is sent with the signs of all; here each
    layer has its own. Moments, and the average of ``c``, are corrected of their bias, which the paper does not do.

    Further arguments, and errors, are those of :class:`AveragingOptimizer`; weight decay is part of what a layer moves
    along.

    Args:
        params: See there.
        freeze_step: See there.
        trust: The least and the largest ratio of a layer's norm to its update's.
        trust_beta: Decay of the average of that, a step.
        factors: The least and the largest ``r``.
        change: The most that ``r`` changes in a step, as a share of it.

    Example:
        >>> optimizer = gradwire.optim.OneBitLamb(net.named_parameters(), freeze_step=500)
        >>> loss.backward(); optimizer.step()
    """

    state_names = (*OneBitAdam.state_names, "exp_avg_sq_fresh")

    def __init__(
        self,
        params: Iterable[Any],
        freeze_step: int,
        *arguments: Any,
        trust: tuple[float, float] = (0.01, 10.0),
        trust_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        change: float = 0.1,
        **others: Any,
    ) -> None:
        self.trust, self.trust_beta, self.factors, self.change = trust, trust_beta, factors, change
        super().__init__(params, freeze_step, *arguments, **others)

    def _make_valid(self) -> None:
        """As all do, and the bounds of ratios."""
        super()._make_valid()
        for name in ("trust", "factors"):
            bounds = getattr(self, name)
            pair = isinstance(bounds, tuple | list) and len(bounds) == 2
            if not (pair and 0 < number(bounds[0]) <= number(bounds[1])):
                raise ConfigurationError(f"{name}={bounds!r} is out of range; choose two numbers, 0 < least <= largest")
            setattr(self, name, tuple(map(plain, bounds)))
        for name in ("trust_beta", "change"):
            share = getattr(self, name)
            if not 0 <= number(share) < 1:
                raise ConfigurationError(f"{name}={share!r} is out of range; choose a number 0 <= {name} < 1")
            setattr(self, name, plain(share))

    def _describe(self) -> dict[str, str]:
        own = ("trust", "trust_beta", "factors", "change")
        return {**super()._describe(), **{name: str(getattr(self, name)) for name in own}}

    def _fresh(self, parameter: Parameter) -> dict[str, Tensor]:
        like = super()._fresh(parameter)
        return {**like, "trust": like["exp_avg"].new_tensor(0.0), "factor": like["exp_avg"].new_tensor(1.0)}

    def _take(self, group: Group, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Goes on from an averaged momentum, and with the variance of the gradients it stands for."""
        momentum_decay, variance_decay = group["betas"]
        fresh = state["exp_avg_sq_fresh"]
        if self.steps == self.freeze_step:
            fresh.copy_(state["exp_avg_sq"])
        gradient = torch.sub(average, state["exp_avg"], alpha=momentum_decay).div_(1 - momentum_decay)
        fresh.mul_(variance_decay).addcmul_(gradient, gradient, value=1 - variance_decay)
        super()._take(group, average, state)

    def _descend(self, group: Group, parameter: Parameter, state: Mapping[str, Tensor]) -> None:
        """Moves a layer by its own learning rate."""
        if not parameter.numel():
            return
        root = self._root(group, state["exp_avg_sq"], self._measured)
        adam = (state["exp_avg"] / root).div_(1 - group["betas"][0] ** (self.steps + 1))
        update = adam.add(parameter, alpha=group["weight_decay"])
        norm, trust = _norm(update), state["trust"]
        if self._frozen:
            self._follow(group, root, _norm(adam) / norm, state)
            rate = trust / (1 - self.trust_beta**self._measured) * state["factor"]
        else:
            ratio = _norm(parameter) / norm
            rate = torch.where((ratio > 0) & ratio.isfinite(), ratio.clamp(*self.trust), 1.0)
            trust.lerp_(rate, 1 - self.trust_beta)
        parameter.sub_(update.mul_(float(group["lr"]) * rate))

    def _follow(self, group: Group, root: Tensor, share: Tensor, state: Mapping[str, Tensor]) -> None:
        """Finds ``r``, with the share of the update that is not weight decay's."""
        fresh, factor = self._root(group, state["exp_avg_sq_fresh"], self.steps + 1), state["factor"]
        largest = (root / fresh).nan_to_num_(nan=1.0).max()
        share = share.nan_to_num(nan=1.0).clamp(max=1)
        wanted = (1 + share * (largest - 1)).clamp(*self.factors)
        factor.copy_(wanted.clamp(factor * (1 - self.change), factor * (1 + self.change)))


def _norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, the same bits on every kind of machine."""
    return length(tensor.float().flatten())[0].float()
