"""Which parameters a module or an optimizer has: whether they are still those that it had when it was attached to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_

from torch import nn
from torch.optim import Optimizer

from gradwire.attach.given import Named, check_left_out, named_by
from gradwire.attach.wrappers import parameters_of
from gradwire.errors import ConfigurationError


class Tree:
    """A module's own modules and parameters, as they are when this is made.

    Args:
        module: Whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.look()

    def named_parameters(self) -> Named:
        """Names and parameters, each once."""
        return parameters_of(self._module)

    def check(self) -> None:
        """Raises ConfigurationError if the module has another parameter now; one by another name is none."""
        if not self.changed():
            return
        before, after = self._named, self.named_parameters()
        kept = {id(each) for _, each in before} & {id(each) for _, each in after}
        for name, each in (*before, *after):
            if id(each) not in kept:
                lacks = name not in dict(before), name not in dict(after)
                what = "is new" if lacks[0] else "is gone" if lacks[1] else "is another one"
                raise ConfigurationError(
                    f"parameter {name!r} {what} since the method was attached, so its gradient would be left out and "
                    "ranks would drift apart; change parameter.data in its place, or close this handle and attach anew"
                )
        self.look()  # modules without parameters have changed, or names

    def changed(self) -> bool:
        """Whether it has other modules or parameters now."""
        now = list(self._present())
        return len(now) != len(self._members) or not all(map(is_, now, self._members))

    def look(self) -> None:
        """Takes what it has now for what it had."""
        self._tables: list[Mapping[str, object]] = [
            table for each in self._module.modules() for table in (each._parameters, each._modules)
        ]
        self._members = list(self._present())
        self._named = self.named_parameters()

    def _present(self) -> chain[object]:
        return chain.from_iterable(table.values() for table in self._tables)


class Trained:
    """An optimizer's parameters, as they are when this is made.

    Args:
        optimizer: Whose.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._named = named_by(optimizer)
        self._frozen = [(name, each) for name, each in self._named if not each.requires_grad]

    def check(self, *, moved: bool) -> None:
        """Raises ConfigurationError if the optimizer has others now, or steps one that required no gradient then.

        Args:
            moved: Whether momentum of averages would go on moving what requires no gradient any more; then that is
                refused, too.
        """
        check_left_out(self._frozen)
        now, before = named_by(self._optimizer), self._named
        if len(now) != len(before) or not all(each is other for (_, each), (_, other) in zip(now, before, strict=True)):
            raise ConfigurationError(
                f"the optimizer has {len(now)} parameters, others than the {len(before)} it had when the handle was "
                "made, and ranks would drift apart by them; call synchronize() and close() before it gets others, and "
                "attach anew"
            )
        was_frozen = {id(each) for _, each in self._frozen}
        for name, each in now if moved else ():
            if not each.requires_grad and id(each) not in was_frozen:
                raise ConfigurationError(
                    f"parameter {name!r} was trained when averaging began and is frozen now, and momentum would go on "
                    "moving it; close what averages, and attach anew with what is to be trained"
                )
