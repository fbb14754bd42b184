"""Index codings by name."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.codecs.index.bitmap import Bitmap
from gradwire.codecs.index.coding import IndexCoding
from gradwire.codecs.index.elias_fano import EliasFano
from gradwire.codecs.index.entropy import Entropy
from gradwire.codecs.index.raw import Raw
from gradwire.errors import ConfigurationError
from gradwire.registry import Registry

codings: Registry[Callable[..., IndexCoding]] = Registry("index coding", ", or an object")
register, names = codings.register, codings.names

register("elias-fano")(EliasFano)
register("entropy")(Entropy)
register("bitmap")(Bitmap)
register("raw")(Raw)


def parse(coding: str | IndexCoding) -> IndexCoding:
    """An index coding by its name, such as ``"bitmap"``, or itself.

    Raises:
        ConfigurationError: If ``coding`` is neither a name of :func:`names` nor an index coding, or its library is not
            installed.
    """
    return coding if isinstance(coding, IndexCoding) else codings.make(coding)


def parse_fixed(coding: str | IndexCoding) -> IndexCoding:
    """Reads as :func:`parse` does.

    Raises:
        ConfigurationError: Also if what positions take depends on more than their number and range.
    """
    found = parse(coding)
    if found.varies:
        raise ConfigurationError(
            f"indices={coding!r} takes a size that depends on the data, which this method's rounds have no room for; "
            "choose 'elias-fano', 'bitmap' or 'raw'"
        )
    return found
