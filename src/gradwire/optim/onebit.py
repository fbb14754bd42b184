"""1-bit Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.codec import Codec
from gradwire.memory import Memory
from gradwire.methods import Method
from gradwire.optim.adam import CompressedAdam, decay
from gradwire.train.configuration import FUSE_BYTES
from gradwire.train.policy import DensePolicy
from gradwire.train.synchronizer import Tensors


class OneBitAdam(CompressedAdam):
    """1-bit Adam: after a warm-up of plain Adam the variance stands still, and compressed momenta are averaged.

    Tang et al. 2021, arXiv:2102.02888. For ``freeze_step`` steps gradients are averaged densely and Adam is plain Adam.
    From then on each worker adds its own gradient to the momentum, ``m = beta1 m + (1 - beta1) g``; the momenta are
    averaged by a method of the catalogue, as published by signs with error feedback at workers and owners; and all step
    along the average, ``x -= lr m / (sqrt(v) + eps)``.

    It averages by itself: use it on a plain model, or under ``model.no_sync()`` on one wrapped in DDP. Gradients may be
    accumulated over as many backward passes as you like. Clipping before a step clips each worker's own gradient.

    Args:
        params: Parameters, or ``net.named_parameters()``, or groups of either.
        freeze_step: Steps of plain Adam at first: the published advice is the warm-up of the learning rate, or 15 to 20
            per cent of the run, and until every row of an embedding has been seen.
        lr: Learning rate.
        betas: Decay of momentum and variance, a step.
        eps: Added to the root of the variance.
        weight_decay: Share of a parameter that is taken off it, times the learning rate, a step: AdamW's.
        floor: Least root of a variance that is not measured in every step, as a share of its mean over the parameter;
            0 as published.
        method: A name of ``gradwire.methods.names()`` or a method object.
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
        >>> optimizer = gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=500)   # doctest: +SKIP
        >>> loss.backward(); optimizer.step()                                                # doctest: +SKIP
    """

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
        self._freeze_step = freeze_step
        schedule = {"freeze_step": freeze_step}
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

    def _step(self, gradients: Tensors) -> None:
        if self.steps < self._freeze_step:
            self._adam_step(gradients)
            return
        momenta = {
            name: self._next_momentum(group, gradients.get(name), state) for group, name, _, state in self._each()
        }
        averages = self._compressed.average(momenta)
        if not self._finite(averages):
            self.skipped += 1
            return
        for group, name, parameter, state in self._each():
            state["exp_avg"].copy_(averages[name])
            decay(parameter, group)
            parameter.addcdiv_(state["exp_avg"], self._root(group, state), value=-self._rate(group))
        self.steps += 1
