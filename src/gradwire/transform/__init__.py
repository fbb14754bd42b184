"""Other bases, in which gradients are easier to send."""

from gradwire.transform.atoms import Atoms
from gradwire.transform.centroids import RotatedCentroids
from gradwire.transform.cosine import Chunks, chunk_block, chunk_sides
from gradwire.transform.hadamard import Levels, Rotation
from gradwire.transform.pca import Slices, principal_components

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
