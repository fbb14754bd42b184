"""How coordinates are written."""

from gradwire.codecs.index.bitmap import Bitmap
from gradwire.codecs.index.coding import IndexCoding
from gradwire.codecs.index.elias_fano import EliasFano
from gradwire.codecs.index.entropy import Entropy
from gradwire.codecs.index.names import names, parse, parse_fixed, register
from gradwire.codecs.index.raw import Raw

__all__ = ["Bitmap", "EliasFano", "Entropy", "IndexCoding", "Raw", "names", "parse", "parse_fixed", "register"]
