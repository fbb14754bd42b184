"""How coordinates are written."""

from gradwire.index.bitmap import Bitmap
from gradwire.index.coding import IndexCoding, parse
from gradwire.index.elias_fano import EliasFano
from gradwire.index.raw import Raw

__all__ = ["Bitmap", "EliasFano", "IndexCoding", "Raw", "parse"]
