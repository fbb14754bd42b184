"""How coordinates are written."""

from gradwire.index.bitmap import Bitmap
from gradwire.index.coding import IndexCoding
from gradwire.index.elias_fano import EliasFano
from gradwire.index.entropy import Entropy
from gradwire.index.names import parse, parse_fixed
from gradwire.index.raw import Raw

__all__ = ["Bitmap", "EliasFano", "Entropy", "IndexCoding", "Raw", "parse", "parse_fixed"]
