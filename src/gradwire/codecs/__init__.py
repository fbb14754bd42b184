"""What turns a block of values into something to send: which coordinates, how values and indices are written.

A :class:`Codec` writes bytes that are gathered or go to owners, a :class:`LinearCodec` numbers that all-reduce.
:class:`Sparse` is three choices: which coordinates (``select``), how values (``quantize``) and indices (``index``) are
written.
"""

from gradwire.codecs.codec import Codec, Decode, LinearCodec
from gradwire.codecs.sparse import Sparse

__all__ = ["Codec", "Decode", "LinearCodec", "Sparse"]
