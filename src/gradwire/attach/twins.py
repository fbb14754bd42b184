"""Models of the same shapes and values: if ranks attached them in another order, nothing but a name would tell."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch.distributed as dist

from gradwire.attach.given import Named

_log = logging.getLogger("gradwire")

_attached: WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[str, ...], bytes, int]] = WeakKeyDictionary()
"""Of each model that has no name, by the group of its own: its parameters' names, their values, and where they lie."""


def tell_of_twins(group: dist.ProcessGroup, name: str | None, parameters: Named, values: bytes) -> None:
    """Warns on the group's first rank if another model that is attached was like this one, and neither has a name.

    Args:
        group: The attachment's own.
        name: What the attachment is called.
        parameters: The model's.
        values: A digest of them.
    """
    if name is not None:
        return
    names, place = tuple(name for name, _ in parameters), parameters[0][1].data_ptr()
    alike = any((names, values) == other[:2] and place != other[2] for other in _attached.values())
    _attached[group] = names, values, place
    if alike and group.rank() == 0:
        _log.warning(
            "two models of the same shapes and values are attached, and nothing would tell if another rank attached "
            "them in another order; give each a name, as in gradwire.compress(model, ..., name='critic')"
        )
