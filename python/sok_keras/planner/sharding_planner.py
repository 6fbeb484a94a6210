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
        enumerator: An `Enumerator`, in place of all other arguments.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        optimizer: Any = None,
        enumerator: Enumerator | None = None,
    ) -> None:
        if enumerator is None:
            if topology is None:
                raise ValueError("Either `topology` or `enumerator` must be given. Received: neither")
            enumerator = Enumerator(topology, 1024 if batch_size is None else batch_size, constraints, optimizer)
        elif any(value is not None for value in (topology, batch_size, constraints, optimizer)):
            raise ValueError("`enumerator` must be given alone, since it has the other arguments. Received: others too")
        self.enumerator = enumerator

    def plan(self, configs: Any) -> ShardingPlan:
        """Returns a plan for a structure of `TableConfig` or `FeatureConfig`. Ranks that train together must plan with equal arguments.

        Raises:
            ValueError: If no plan is found that fits: how many bytes are missing on which device or host. Also as `Enumerator.enumerate`.
        """
        options = self.enumerator.enumerate(configs)
        topology = self.enumerator.topology
        found, missing, is_exact = [], [], True
        # The launches of a step depend on which storages there are.
        for storages in (("hbm",), ("host",), ("hbm", "host")):
            allowed = {name: [one for one in some if one.storage in storages] for name, some in options.items()}
            if not all(allowed.values()):
                continue
            problem = _problem(list(allowed.values()), topology)
            choice, is_best = search(problem)
            is_exact &= is_best
            too_much = problem.missing(problem.sums(choice)[1])
            if too_much.any():
                missing.append(too_much)
            else:
                found.append({name: allowed[name][option] for name, option in zip(allowed, choice, strict=True)})
        if not found:
            raise ValueError(_missing_text(min(missing, key=np.sum), topology, is_exact))
        plans = [ShardingPlan(topology, self.enumerator.batch_size, chosen, options, is_exact) for chosen in found]
        return min(plans, key=ShardingPlan.step_time)


def _memories(option: ShardingOption, topology: Topology) -> np.ndarray:
    """Returns the bytes of devices, by rank, and of hosts."""
    devices = np.array([cost.memory for cost in option.costs])
    hosts = np.zeros(topology.num_hosts)
    for rank, cost in enumerate(option.costs):
        hosts[topology.host_of(rank)] += cost.host_memory
    return np.concatenate([devices, hosts])


def _problem(options: list[list[ShardingOption]], topology: Topology) -> Problem:
    times = [np.array([[cost.time for cost in option.costs] for option in some]) for some in options]
    sizes = [np.array([_memories(option, topology) for option in some]) for some in options]
    budgets = np.array([topology.budget] * topology.world_size + [topology.host_budget] * topology.num_hosts)
    return Problem(times, sizes, budgets, topology.num_hosts == 1 and all(_are_alike(some) for some in options))


def _are_alike(options: list[ShardingOption]) -> bool:
    """Returns whether ranks may change places: whatever one has in an option, each other one has in another one."""
    costs = {option.costs for option in options}

    def swapped(of_option: tuple, rank: int) -> tuple:
        return (*of_option[:rank], of_option[rank + 1], of_option[rank], *of_option[rank + 2 :])

    return all(swapped(of_option, rank) in costs for of_option in costs for rank in range(len(of_option) - 1))


def _missing_text(missing: np.ndarray, topology: Topology, is_exact: bool) -> str:
    ranks = topology.world_size
    names = [f"the device of rank {rank}" for rank in range(ranks)] + [
        f"host {host}" for host in range(topology.num_hosts)
    ]
    places = [f"{bytes_text(size)} on {name}" for name, size in zip(names, missing, strict=True) if size]
    shown = ", ".join(places[:8]) + (f" and {len(places) - 8} others" if len(places) > 8 else "")
    what = "The tables do not fit" if is_exact else "No plan was found in which the tables fit"
    return (
        f"{what}. Missing: {shown}. There are {bytes_text(topology.budget)} for tables on each device and "
        f"{bytes_text(topology.host_budget)} on each host"
    )
