"""What holds threads and process groups, which neither a file nor a copy can have."""

from __future__ import annotations

from pickle import PicklingError
from typing import NoReturn


class Uncopied:
    """Refuses to be pickled and copied, and says what to do; its ``state_dict()`` can be."""

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            f"a {type(self).__name__} cannot be saved, sent or copied; save its state_dict(), and attach anew to load "
            "it"
        )
