"""A plan: what was chosen for each table, and why."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from sok_keras.feature_config import FeatureConfig
from sok_keras.planner.enumerator import ShardingOption
from sok_keras.planner.topology import Topology
from sok_keras.planner.units import bytes_text, table_text, time_text
from sok_keras.planner.workload import tables_of
from sok_keras.table_config import TableConfig

_PARTS = ("lookup", "update", "exchange", "host")
_BAR = 40
# Seconds in which the host enqueues a step of GPUs that share tables: of any number of tables, and for each. Measured with 4 to 40 of them on two GPUs.
_ENQUEUE, _ENQUEUE_TABLE = 0.25e-3, 4e-6


class ShardingPlan(Mapping[str, ShardingOption]):
    """Maps the names of tables to the `ShardingOption` chosen for each.

    Args:
        topology: The ranks.
        batch_size: Samples of a step on each rank.
        chosen: The option of each table, by name.
        options: All options of each table, by name.
        is_exact: Whether no other options are faster, by the same figures.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        chosen: dict[str, ShardingOption],
        options: dict[str, list[ShardingOption]],
        is_exact: bool,
    ) -> None:
        self.topology, self.batch_size = topology, batch_size
        self.chosen, self.options, self.is_exact = chosen, options, is_exact
        costs = [[option.costs[rank] for option in chosen.values()] for rank in range(topology.world_size)]
        self._used = [(sum(cost.memory for cost in some), sum(cost.host_memory for cost in some)) for some in costs]
        self._on_hosts = [0.0] * topology.num_hosts
        for rank, (_, on_host) in enumerate(self._used):
            self._on_hosts[topology.host_of(rank)] += on_host
        # Without what does not depend on the tables.
        self._times = [sum(cost.time for cost in some) for some in costs]

    def __getitem__(self, name: str) -> ShardingOption:
        return self.chosen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    # ---- figures

    def fixed_time(self) -> float:
        """Returns the seconds of a step that do not depend on the tables: launches, and one exchange with each other rank."""
        return self._fixed_time({option.storage for option in self.values()})

    def _fixed_time(self, storages: set[str]) -> float:
        hardware, ranks = self.topology.hardware, self.topology.world_size
        launches = (hardware.launch if "hbm" in storages else 0.0) + (
            hardware.host_launch if "host" in storages else 0.0
        )
        return launches + hardware.link_latency * (ranks - 1)

    def parts(self, rank: int) -> dict[str, float]:
        """Returns the seconds of each part of a step on a rank."""
        costs = [option.costs[rank] for option in self.values()]
        fixed = self.step_time(rank) - self._times[rank]
        return {"fixed": fixed} | {part: sum(getattr(cost, part) for cost in costs) for part in _PARTS}

    def step_time(self, rank: int | None = None) -> float:
        """Returns the seconds that the tables take in a step: of a rank, or of the slowest one."""
        of_tables = max(self._times) if rank is None else self._times[rank]
        return max(self.fixed_time() + of_tables, self._enqueue_time())

    def _enqueue_time(self) -> float:
        """Returns the seconds of the host for a step of GPUs that share tables. A shorter step of the GPU waits for it."""
        shares = self.topology.world_size > 1 and any(option.storage == "hbm" for option in self.values())
        return _ENQUEUE + _ENQUEUE_TABLE * len(self) if shares else 0.0

    def table_bytes(self, name: str) -> float:
        """Returns the bytes of a table on all ranks."""
        return sum(cost.memory + cost.host_memory for cost in self[name].costs)

    def rank_bytes(self, rank: int) -> tuple[float, float]:
        """Returns the bytes of all tables on the device of a rank, and on its host."""
        return self._used[rank]

    # ---- use

    def apply(self, configs: Any) -> Any:
        """Returns the same structure of `TableConfig` or `FeatureConfig` with the placements and storages of the plan.

        The given objects stay as they are. Initializers and optimizers are shared with them, and features that share a table still do.

        Raises:
            ValueError: If the plan has no option for a table, or if features of one layer would have tables in two storages: `split` makes
                the features of two layers of them.
        """
        tables = self._applied_tables(configs)
        features = [config for config in keras.tree.flatten(configs) if isinstance(config, FeatureConfig)]
        storages = {feature.table.name: tables[feature.table.name].storage for feature in features}
        if len(set(storages.values())) > 1:
            raise ValueError(
                "The tables of a layer must have one `storage`. Make a layer for each with `plan.split(configs)`. Received: "
                + ", ".join(f"{name}={storage!r}" for name, storage in list(storages.items())[:16])
            )
        return keras.tree.map_structure(_applied(tables), configs)

    def split(self, configs: Any) -> dict[str, Any]:
        """Returns the applied configs by storage, each for a layer of its own.

        Args:
            configs: A list, a tuple or a dict of `TableConfig` or `FeatureConfig`.

        Returns:
            `"hbm"` and `"host"`, as far as there are tables: a list, or a dict with the same names.

        Raises:
            ValueError: If the plan has no option for a table, or if `configs` is nested.
        """
        if not isinstance(configs, list | tuple | dict):
            raise ValueError(f"`configs` must be a list, a tuple or a dict. Received: {type(configs).__name__}")
        items = list(configs.items() if isinstance(configs, dict) else enumerate(configs))
        if not all(isinstance(config, TableConfig | FeatureConfig) for _, config in items):
            raise ValueError("`configs` must not be nested, so that it can be split")
        applied = _applied(self._applied_tables(configs))
        parts: dict[str, list] = {}
        for name, config in items:
            table = config.table if isinstance(config, FeatureConfig) else config
            parts.setdefault(self[table.name].storage, []).append((name, applied(config)))
        is_dict = isinstance(configs, dict)
        return {storage: dict(some) if is_dict else [config for _, config in some] for storage, some in parts.items()}

    def _applied_tables(self, configs: Any) -> dict[str, TableConfig]:
        tables = {}
        for name, (config, _) in tables_of(configs).items():
            if name not in self:
                raise ValueError(
                    f"the plan must be for the same tables. Received: table {name!r}, which it does not have"
                )
            tables[name] = copy.copy(config)
            tables[name].placement, tables[name].storage = self[name].placement, self[name].storage
        return tables

    # ---- reports

    def explain(self) -> str:
        """Returns a report: bytes and times of each rank and table, what was rejected and why, and a plot of the ranks' times."""
        hardware = self.topology.hardware
        kind = "exact" if self.is_exact else "heuristic"
        title = (
            f"{len(self)} tables on {self.topology.world_size} x {hardware.name}, {self.batch_size} samples a rank: "
            f"{time_text(self.step_time())} a step ({kind} search)"
        )
        return (
            "\n\n".join([title, self._ranks_text(), self._plot_text(), self._tables_text(), self._rejected_text()])
            + "\n"
        )

    def __str__(self) -> str:
        return self.explain()

    def _ranks_text(self) -> str:
        rows = []
        for rank in range(self.topology.world_size):
            on_device, on_host = self.rank_bytes(rank)
            parts = self.parts(rank)
            rows.append(
                [
                    str(rank),
                    f"{bytes_text(on_device)} of {bytes_text(self.topology.budget)}",
                    bytes_text(on_host),
                    *(time_text(seconds) for seconds in parts.values()),
                    time_text(sum(parts.values())),
                ]
            )
        budget = bytes_text(self.topology.host_budget)
        hosts = [f"host {host}: {bytes_text(used)} of {budget}" for host, used in enumerate(self._on_hosts)]
        return "\n".join([table_text(["rank", "device", "host", "fixed", *_PARTS, "step"], rows), *hosts])

    def _plot_text(self) -> str:
        longest = self.step_time()
        lines = []
        for rank in range(self.topology.world_size):
            parts = self.parts(rank)
            bar = "".join(name[0] * round(_BAR * seconds / longest) for name, seconds in parts.items())
            lines.append(f"rank {rank:3} |{bar}")
        return "\n".join([*lines, "          f fixed, l lookup, u update, e exchange, h host"])

    def _tables_text(self) -> str:
        rows = [
            [name, option.placement, option.storage, bytes_text(self.table_bytes(name)), time_text(option.time)]
            for name, option in self.items()
        ]
        return table_text(["table", "placement", "storage", "bytes, all ranks", "on the slowest rank"], _grouped(rows))

    def _rejected_text(self) -> str:
        rows = []
        for name, options in self.options.items():
            # Tables on one rank differ in the rank alone. The best of them stands for all.
            best: dict[tuple[str, str], tuple[float, str]] = {}
            for option in options:
                if option is self[name]:
                    continue
                kind = (option.placement.split(":")[0], option.storage)
                time, reason = self._instead(option)
                if kind not in best or time < best[kind][0]:
                    best[kind] = time, reason
            rows += [[name, f"{placement}, {storage}", reason] for (placement, storage), (_, reason) in best.items()]
        rows.sort(key=lambda row: row[1:])
        return table_text(["table", "rejected", "because"], _grouped(rows)) if rows else "There was no other option."

    def _instead(self, option: ShardingOption) -> tuple[float, str]:
        """Returns the time of a step with this option instead of the chosen one, and why it was rejected."""
        pairs = list(zip(option.costs, self[option.table].costs, strict=True))
        on_hosts = list(self._on_hosts)
        for rank, (cost, instead_of) in enumerate(pairs):
            missing = self._used[rank][0] + cost.memory - instead_of.memory - self.topology.budget
            if missing > 1:
                return math.inf, f"{bytes_text(missing)} would be missing on the device of rank {rank}"
            on_hosts[self.topology.host_of(rank)] += cost.host_memory - instead_of.host_memory
        for host, used in enumerate(on_hosts):
            missing = used - self.topology.host_budget
            if missing > 1:
                return math.inf, f"{bytes_text(missing)} would be missing on host {host}"
        times = [
            seconds + cost.time - instead_of.time
            for seconds, (cost, instead_of) in zip(self._times, pairs, strict=True)
        ]
        storages = {other.storage for name, other in self.items() if name != option.table} | {option.storage}
        slower = max(max(times) + self._fixed_time(storages), self._enqueue_time()) - self.step_time()
        if slower > 1e-9:
            return slower, f"the step would take {time_text(slower)} more"
        work = sum(times) - sum(self._times)
        return slower, f"the slowest rank would take as long, and all ranks together {time_text(max(work, 0.0))} more"

    def compare(self, measured: Mapping[str, Any]) -> str:
        """Returns a report of what was predicted beside what was measured.

        Args:
            measured: `"step"`: the seconds that the tables take in a step, of the slowest rank. `"bytes"`: the bytes of tables by name, as
                `Table.stats().bytes` has them: of all ranks together, or of one rank if the table is replicated.

        Raises:
            ValueError: If there is something else, or a table that the plan does not have.
        """
        sizes = measured.get("bytes", {})
        figures = [*([measured["step"]] if "step" in measured else []), *sizes.values()]
        if set(measured) - {"step", "bytes"} or not figures:
            raise ValueError(f'`measured` must hold "step", "bytes" or both. Received: {sorted(measured)}')
        if not set(sizes) <= set(self):
            raise ValueError(
                f"`measured` must be of tables of the plan. Received: bytes of {sorted(set(sizes) - set(self))}"
            )
        for figure in figures:
            if not (isinstance(figure, int | float | np.number) and figure > 0):
                raise ValueError(f"`measured` must hold positive numbers. Received: {figure!r}")
        rows = []
        if "step" in measured:
            rows.append(_compared("step", self.step_time(), measured["step"], time_text))
        for name, size in sizes.items():
            ranks = self.topology.world_size if self[name].placement == "replicated" else 1
            rows.append(_compared(f"bytes of {name}", self.table_bytes(name) / ranks, size, bytes_text))
        return table_text(["", "predicted", "measured", "predicted / measured"], rows) + "\n"


def _applied(tables: dict[str, TableConfig]) -> Callable[[Any], Any]:
    """Returns a function that replaces the table of a config. Objects that are the same stay the same."""
    features: dict[int, FeatureConfig] = {}

    def applied(config: Any) -> Any:
        if isinstance(config, TableConfig):
            return tables[config.name]
        if id(config) not in features:
            features[id(config)] = copy.copy(config)
            features[id(config)].table = tables[config.table.name]
        return features[id(config)]

    return applied


def _grouped(rows: list[list[str]]) -> list[list[str]]:
    """Returns the rows, with one for many that come one after the other and differ in the name of the table alone."""
    groups = [(names, list(some)) for names, some in itertools.groupby(rows, key=lambda row: row[1:])]
    return [
        [some[0][0] if len(some) == 1 else f"{some[0][0]} and {len(some) - 1} like it", *rest] for rest, some in groups
    ]


def _compared(what: str, predicted: float, measured: float, text: Any) -> list[str]:
    return [what, text(predicted), text(measured), f"{predicted / measured:.3f}"]
