"""How payloads become an average."""

from gradwire.routes.allreduce import allreduce
from gradwire.routes.gather import gather
from gradwire.routes.sharded import sharded

__all__ = ["allreduce", "gather", "sharded"]
