"""Gradients as products of two thin matrices."""

from gradwire.lowrank.matrices import Matrices, check_rank, gains, group, orthonormal_rows, scaled_rows

__all__ = ["Matrices", "check_rank", "gains", "group", "orthonormal_rows", "scaled_rows"]
