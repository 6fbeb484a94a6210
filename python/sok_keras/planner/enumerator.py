"""The ways in which a table can be placed and stored, and what each costs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from sok_keras.distributed import is_replicated_by_default
from sok_keras.planner.costs import Cost, CostModel
from sok_keras.planner.topology import Topology
from sok_keras.planner.workload import ParameterConstraints, constraints_of, tables_of, workload_of
from sok_keras.table_config import TableConfig


@dataclasses.dataclass(frozen=True)
class ShardingOption:
    """A placement and a storage of a table.

    Args:
        table: Name of the table.
        placement: As in `TableConfig`.
        storage: `"hbm"` or `"host"`.
        costs: By rank.
    """

    table: str
    placement: str
    storage: str
    costs: tuple[Cost, ...]

    @property
    def time(self) -> float:
        """Seconds on the rank that takes longest."""
        return max(cost.time for cost in self.costs)

    def __str__(self) -> str:
        return f"{self.placement}, {self.storage}"


class Enumerator:
    """Lists the options of tables.

    Args:
        topology: The ranks.
        batch_size: Samples of a step on each rank.
        constraints: `ParameterConstraints` by name of a table. Tables without any have the defaults.
        optimizer: Keras optimizer of the tables that have none of their own, or its name. None: rows have no states.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        optimizer: Any = None,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"`batch_size` must be a positive int. Received: batch_size={batch_size!r}")
        self.topology, self.batch_size, self.constraints = topology, batch_size, constraints
        self.optimizer = None if optimizer is None else keras.optimizers.get(optimizer)

    def enumerate(self, configs: Any) -> dict[str, list[ShardingOption]]:
        """Returns the options of each table of a structure of `TableConfig` or `FeatureConfig`, by name.

        Raises:
            ValueError: If constraints name tables that are not there, leave a table no option, or lack the rows of a dynamic table.
        """
        tables = tables_of(configs)
        constraints = constraints_of(self.constraints, list(tables))
        loads = {name: workload_of(*tables[name], constraints[name]) for name in tables}
        of_sample = sum(4 * loads[name].bags * config.embedding_dim for name, (config, _) in tables.items())
        options = {}
        for name, (config, _) in tables.items():
            model = CostModel(
                self.topology, self.batch_size, self.optimizer, config, loads[name], self.batch_size * of_sample
            )
            options[name] = self._options_of(config, constraints[name], model)
        return options

    def _options_of(
        self, config: TableConfig, constraints: ParameterConstraints, model: CostModel
    ) -> list[ShardingOption]:
        ranks, options = self.topology.world_size, []
        for storage in self._storages(config, constraints):
            of_owner, of_others = model.localized(storage)
            for placement in self._placements(config, constraints):
                if placement == "distributed":
                    costs = (model.distributed(storage),) * ranks
                elif placement == "replicated":
                    costs = (model.replicated(storage),) * ranks
                else:
                    owner = int(placement.removeprefix("localized:"))
                    costs = tuple(of_owner if rank == owner else of_others for rank in range(ranks))
                options.append(ShardingOption(config.name, placement, storage, costs))
        return options

    def _storages(self, config: TableConfig, constraints: ParameterConstraints) -> list[str]:
        asked = constraints.storages or ([config.storage] if config.storage != "auto" else ["hbm", "host"])
        asked = ["hbm", "host"] if "auto" in asked else list(dict.fromkeys(asked))
        known = [storage for storage in asked if storage == "host" or self.topology.has_devices]
        if not known:
            raise ValueError(
                f"table {config.name!r} must be on a device, but the topology's ranks have none. Received: storages={asked}"
            )
        return known

    def _placements(self, config: TableConfig, constraints: ParameterConstraints) -> list[str]:
        ranks = self.topology.world_size
        if constraints.placements is None and config.placement not in ("auto", "default_device"):
            asked = [config.placement]
        elif constraints.placements is None or {"auto", "default_device"} & set(constraints.placements):
            asked = ["distributed"]
            if ranks > 1:
                asked += ["replicated"] if is_replicated_by_default(config) else []
                asked += [f"localized:{rank}" for rank in range(ranks)]
        else:
            asked = list(dict.fromkeys(constraints.placements))
        for placement in asked:
            owner = placement.removeprefix("localized:")
            if owner != placement and int(owner) >= ranks:
                raise ValueError(f"table {config.name!r} cannot be on rank {owner}: the topology has {ranks} ranks")
            if placement == "replicated" and config.vocabulary_size is None:
                raise ValueError(
                    f'table {config.name!r} is dynamic, so its placement cannot be "replicated". Received: placements={asked}'
                )
        return asked
