"""What a restart needs: the form of a state, for other numbers of workers, and in checkpoints of all ranks."""

from gradwire.state.per_rank import PerRank
from gradwire.state.redistribution import redistribute

__all__ = ["PerRank", "redistribute"]
