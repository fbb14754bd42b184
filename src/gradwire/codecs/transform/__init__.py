"""Other bases, in which gradients are easier to send."""

from gradwire.codecs.transform.atoms import Atoms
from gradwire.codecs.transform.centroids import RotatedCentroids
from gradwire.codecs.transform.cosine import Chunks, chunk_block, chunk_sides
from gradwire.codecs.transform.hadamard import Levels, Rotation
from gradwire.codecs.transform.pca import Slices, principal_components

__all__ = [
    "Atoms",
    "Chunks",
    "Levels",
    "RotatedCentroids",
    "Rotation",
    "Slices",
    "chunk_block",
    "chunk_sides",
    "principal_components",
]
