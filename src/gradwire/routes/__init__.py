"""How payloads become an average."""

from gradwire.routes.allreduce import allreduce
from gradwire.routes.gather import gather
from gradwire.routes.integer import SharedLevels, check_largest, integer
from gradwire.routes.merge import merge
from gradwire.routes.names import Route, get, names, register
from gradwire.routes.operator import Operator
from gradwire.routes.regions import Regions, regions
from gradwire.routes.sharded import Shards, scattered, scattered_densely, sharded
from gradwire.routes.two_level import Shares, two_level

__all__ = [
    "Operator",
    "Regions",
    "Route",
    "Shards",
    "SharedLevels",
    "Shares",
    "allreduce",
    "check_largest",
    "gather",
    "get",
    "integer",
    "merge",
    "names",
    "regions",
    "register",
    "scattered",
    "scattered_densely",
    "sharded",
    "two_level",
]
