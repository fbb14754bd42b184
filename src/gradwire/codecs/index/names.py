"""Index codings by name."""

from __future__ import annotations

from gradwire.codecs.index.bitmap import Bitmap
from gradwire.codecs.index.coding import IndexCoding
from gradwire.codecs.index.elias_fano import EliasFano
from gradwire.codecs.index.entropy import Entropy
from gradwire.codecs.index.raw import Raw
from gradwire.errors import ConfigurationError


def parse(coding: str | IndexCoding) -> IndexCoding:
    """Reads ``raw``, ``bitmap``, ``elias-fano`` or ``entropy``.

    Raises:
        ConfigurationError: If ``coding`` is neither these nor an index coding, or its library is not installed.
    """
    match coding:
        case IndexCoding():
            return coding
        case "raw":
            return Raw()
        case "bitmap":
            return Bitmap()
        case "elias-fano":
            return EliasFano()
        case "entropy":
            return Entropy()
    raise ConfigurationError(f"index coding {coding!r} is not known; choose 'raw', 'bitmap', 'elias-fano' or 'entropy'")


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
