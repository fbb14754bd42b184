"""Which parameters a module has: whether they are still those that it had when a method was attached."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_

from torch import nn

from gradwire.attach.given import Named
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
        return list(self._module.named_parameters())

    def check(self) -> None:
        """Raises ConfigurationError if the module has another parameter now."""
        if not self.changed():
            return
        before, after = (dict(each) for each in (self._named, self.named_parameters()))
        for name in [*before, *after]:
            if before.get(name) is not after.get(name):
                what = "is new" if name not in before else "is gone" if name not in after else "is another one"
                raise ConfigurationError(
                    f"parameter {name!r} {what} since the method was attached, so its gradient would be left out and "
                    "ranks would drift apart; change parameter.data in its place, or close this handle and attach anew"
                )
        self.look()  # modules without parameters have changed

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
