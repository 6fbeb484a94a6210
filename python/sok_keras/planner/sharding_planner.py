"""The planner."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sok_keras.planner.enumerator import Enumerator, ShardingOption
from sok_keras.planner.search import Problem, search
from sok_keras.planner.sharding_plan import ShardingPlan
from sok_keras.planner.topology import Topology
from sok_keras.planner.units import bytes_text
from sok_keras.planner.workload import ParameterConstraints


class ShardingPlanner:
    """Finds a placement and a storage for each table, so that a step of the slowest rank takes the shortest time.

    The search is exact where few assignments can be the best. Otherwise it starts with the fastest option of each table, moves the tables that
    cost the least time for each byte while memory is missing, and changes single tables while that makes the slowest rank faster.

    Args:
        topology: The ranks.
        batch_size: Samples of a step on each rank.
        constraints: `ParameterConstraints` by name of a table.
        optimizer: Keras optimizer of the tables that have none of their own, or its name. None: rows have no states.
        enumerator: An `Enumerator`, in place of one with these arguments.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = 1024,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        optimizer: Any = None,
        enumerator: Enumerator | None = None,
    ) -> None:
        self.enumerator = enumerator or Enumerator(topology, batch_size, constraints, optimizer)

    def plan(self, configs: Any) -> ShardingPlan:
        """Returns a plan for a structure of `TableConfig` or `FeatureConfig`.

        Raises:
            ValueError: If the tables do not fit: how many bytes are missing on which rank. Also as `Enumerator.enumerate`.
        """
        options = self.enumerator.enumerate(configs)
        topology = self.enumerator.topology
        problem = _problem(list(options.values()), topology)
        choice, is_exact = search(problem)
        missing = problem.missing(problem.sums(choice)[1])
        if missing.any():
            raise ValueError(_missing_text(missing, topology))
        chosen = {name: some[option] for (name, some), option in zip(options.items(), choice, strict=True)}
        return ShardingPlan(topology, self.enumerator.batch_size, chosen, options, is_exact)


def _problem(options: list[list[ShardingOption]], topology: Topology) -> Problem:
    times = [np.array([[cost.time for cost in option.costs] for option in some]) for some in options]
    sizes = [
        np.array([[c.memory for c in option.costs] + [c.host_memory for c in option.costs] for option in some])
        for some in options
    ]
    ranks = topology.world_size
    return Problem(times, sizes, np.array([topology.budget] * ranks + [topology.host_budget] * ranks))


def _missing_text(missing: np.ndarray, topology: Topology) -> str:
    ranks = topology.world_size
    of_devices = [(f"the device of rank {rank}", size) for rank, size in enumerate(missing[:ranks]) if size]
    of_hosts = [(f"the host of rank {rank}", size) for rank, size in enumerate(missing[ranks:]) if size]
    places = [f"{bytes_text(size)} on {place}" for place, size in of_devices + of_hosts]
    shown = ", ".join(places[:8]) + (f" and {len(places) - 8} others" if len(places) > 8 else "")
    return (
        f"the tables do not fit. Missing: {shown}. There are {bytes_text(topology.budget)} for tables on each device and "
        f"{bytes_text(topology.host_budget)} on the host of each rank"
    )
