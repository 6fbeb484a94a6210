"""A planner of placements: which ranks have the rows of each table, and in which memory.

It reads no GPU, so a plan for another machine is a dry run. Nothing uses it unless asked: `TableConfig.placement` and
`TableConfig.storage` say what a plan would.

Example:

>>> import sok_keras as sok
>>> tables = [sok.TableConfig("users", None, 64, max_capacity=200_000_000), sok.TableConfig("days", 7, 8)]
>>> topology = sok.planner.Topology(8, sok.planner.H200)
>>> plan = sok.planner.ShardingPlanner(topology, batch_size=8192, optimizer="adam").plan(tables)
>>> plan["users"].placement, plan["users"].storage
('distributed', 'hbm')
>>> tables = plan.apply(tables)
"""

from sok_keras.planner.enumerator import Enumerator, ShardingOption
from sok_keras.planner.hardware import H100, H200, Hardware
from sok_keras.planner.measuring import measure
from sok_keras.planner.sharding_plan import ShardingPlan
from sok_keras.planner.sharding_planner import ShardingPlanner
from sok_keras.planner.topology import Topology
from sok_keras.planner.workload import ParameterConstraints

__all__ = [
    "H100",
    "H200",
    "Enumerator",
    "Hardware",
    "ParameterConstraints",
    "ShardingOption",
    "ShardingPlan",
    "ShardingPlanner",
    "Topology",
    "measure",
]
