"""Bytes of a table, and seconds that it takes in a step."""

import dataclasses
import math

import keras

from sok_keras import _native as native
from sok_keras.general import GeneralUpdate
from sok_keras.optimizers import core_rule
from sok_keras.planner.hardware import IDS_OF_GATHER
from sok_keras.planner.topology import Topology
from sok_keras.planner.workload import Workload
from sok_keras.table_config import TableConfig
from sok_keras.table_optimizers import core_update

_NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ID_BYTES = 8
# As `IDS_OF_GATHER`: ids that a rank makes distinct before it sends them; ids that an owner looks up and pools for other ranks.
_DISTINCT_OF_GATHER, _SERVED_OF_GATHER = 0.8, 0.18
# Bytes of rows a second that a host reads and writes, divided by `host_gather`. Fitted to four steps on two cores. A GPU reaches `copy`.
_HOST_BYTES_OF_GATHER = 0.41 * 64

# Index of a table on a host: bytes of a slot, slots of a part, and between which loads the parts double (`crates/core/src/store/index`).
_HOST_SLOT, _HOST_PART, _HOST_LOADS = 16, 2**17, (0.6, 0.8)
# Index of a table on a GPU: bytes and slots of a bucket, load, and keys of the smallest index (`crates/cuda/src/index.rs`).
_BUCKET, _BUCKET_SLOTS, _LOAD, _FIRST_KEYS = 64, 5, 0.7, 224
_UNIT, _PAGE = 16, 2**21
# Bytes of a row's score, key and last use of a host, where their memory doubles. Of a GPU: of its score, its key, and a bit; of its part of a
# floor, if rows are evicted; and of its last use.
_HOST_USE, _USE, _FLOOR, _LAST_USE = 20, (8, 8, 1 / 8), (1, 1), 8
# Bytes of a GPU's second-level cache.
_CACHE = 50e6


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a table costs each rank that has a part in it.

    Args:
        memory: Bytes of the device.
        host_memory: Bytes of the host.
        lookup: Seconds of finding and reading rows, and of writing them to the outputs.
        update: Seconds of reading gradients and updating rows.
        exchange: Seconds of making ids distinct, and of sending ids, rows and gradients between ranks.
        host: Seconds of copies between host and device, and of the host's work for tables that it keeps.
    """

    memory: float = 0.0
    host_memory: float = 0.0
    lookup: float = 0.0
    update: float = 0.0
    exchange: float = 0.0
    host: float = 0.0

    @property
    def time(self) -> float:
        return self.lookup + self.update + self.exchange + self.host


def state_widths(config: TableConfig, optimizer: keras.optimizers.Optimizer | None) -> list[int]:
    """Returns the numbers of a row's optimizer states, for each state."""
    optimizer = config.optimizer or optimizer
    if optimizer is None:
        return []
    if core_rule(optimizer) is None:
        return [config.embedding_dim] * len(GeneralUpdate(optimizer).states)
    return [width for _, width in native.states_of(core_update(optimizer), config.embedding_dim)[1]]


def _quads(width: int) -> int:
    return -(-width // 4)


def record_bytes(config: TableConfig, states: list[int], storage: str) -> int:
    """Returns the bytes of a row with its states."""
    number = _NUMBER_BYTES[config.embedding_dtype]
    if storage == "host":
        key = 2 if config.stochastic_rounding else 0
        return 4 * (math.ceil(config.embedding_dim * number / 4) + key + sum(states))
    row = math.ceil(_quads(config.embedding_dim) * number / 4) + int(config.stochastic_rounding)
    return _UNIT * (row + sum(map(_quads, states)))


def _host_index_bytes(rows: int) -> float:
    parts = 1
    smallest, largest = _HOST_LOADS
    part = _HOST_PART if rows > smallest * _HOST_PART else 2 ** math.ceil(math.log2(max(rows / smallest, 4)))
    while rows > largest * parts * part:
        parts *= 2
    load = rows / (parts * part)
    # Each part doubles at a load of its own.
    doubled = min(max((load - smallest) / (largest - smallest), 0.0), 1.0)
    return _HOST_SLOT * parts * part * (1 + doubled)


def _device_index_bytes(rows: int, capacity: float) -> float:
    keys: float = _FIRST_KEYS
    while keys < rows:
        keys = min(2 * keys, max(capacity, rows))
    return _BUCKET * math.ceil(keys / _LOAD / _BUCKET_SLOTS)


def table_bytes(config: TableConfig, rows: int, states: list[int], storage: str) -> float:
    """Returns the bytes of a table with so many rows, as `Table.stats().bytes` counts them.

    A table on a GPU that grows has memory for up to a quarter more records.
    """
    records = record_bytes(config, states, storage) * (rows + 1)
    has_uses = config.eviction is not None or config.time_to_live is not None
    reserved = max(rows, config.initial_capacity)
    if storage == "host":
        uses = _HOST_USE * 2 ** math.ceil(math.log2(max(rows + 1, 64))) if has_uses else 0
        return records + _host_index_bytes(reserved) + uses
    capacity = config.max_capacity or math.inf
    last_use = [_LAST_USE] if config.time_to_live is not None else []
    floor = _FLOOR if config.eviction is not None else ()
    pages = [record_bytes(config, states, storage), *(_USE if has_uses else ()), *floor, *last_use]
    return sum(math.ceil(size * (reserved + 1) / _PAGE) * _PAGE for size in pages) + _device_index_bytes(rows, capacity)


class CostModel:
    """Costs of tables on the ranks of a topology.

    A step of one GPU takes `launch + ids / (0.42 * gather) + bytes / copy`. The bytes are the outputs written and their gradients read, the
    distinct rows read, and their records read and written; and where the gradients of all bags do not fit into the cache of the GPU, the gradients
    that the ids of bags read again, at half the speed. Between ranks, each distinct row that another rank owns is sent, and so is its gradient.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        optimizer: keras.optimizers.Optimizer | None,
        config: TableConfig,
        load: Workload,
        output_bytes: float,
    ) -> None:
        self.topology, self.config, self.load = topology, config, load
        # Each id of a bag reads the gradient of the bag again. All do so from the cache if the gradients of the step fit into it.
        self.misses = min(max(output_bytes / _CACHE - 1, 0.0), 1.0)
        self.states = state_widths(config, optimizer)
        self.num_ids = batch_size * load.hotness
        self.num_bags = batch_size * load.bags
        self.row_bytes = 4 * config.embedding_dim

    def _work(
        self, num_ids: float, num_bags: float, distinct: float, storage: str, updated: float | None = None
    ) -> tuple[float, float]:
        """Returns the seconds of a lookup and of an update by the processor that has the table. `updated`: rows, if not the `distinct` ones."""
        gather = self._gather(storage)
        copy = self.topology.hardware.copy if storage == "hbm" else _HOST_BYTES_OF_GATHER * gather
        record = record_bytes(self.config, self.states, storage)
        row = _NUMBER_BYTES[self.config.embedding_dtype] * self.config.embedding_dim
        of_ids = num_ids / (IDS_OF_GATHER * gather)
        outputs = num_bags * self.row_bytes / copy
        again = self.misses * 2 * max(num_ids - num_bags, 0.0) * self.row_bytes / copy if storage == "hbm" else 0.0
        trained = (
            (of_ids / 2 + outputs + again + 2 * (updated or distinct) * record / copy) if self.config.trainable else 0.0
        )
        return of_ids / 2 + outputs + distinct * row / copy, trained

    def _cost(
        self, rows: float, storage: str, lookup: float, update: float, exchange: float, link_bytes: float
    ) -> Cost:
        size = table_bytes(self.config, math.ceil(rows), self.states, storage) if rows else 0.0
        if storage == "hbm":
            return Cost(memory=size, lookup=lookup, update=update, exchange=exchange)
        copies = link_bytes / self.topology.hardware.host_link if self.topology.has_devices else 0.0
        return Cost(host_memory=size, exchange=exchange, host=lookup + update + copies)

    def _gather(self, storage: str) -> float:
        hardware = self.topology.hardware
        return hardware.gather if storage == "hbm" else hardware.host_gather / self.topology.ranks_of_a_host

    @property
    def _directions(self) -> int:
        return 2 if self.config.trainable else 1

    def _link_bytes(self, num_ids: float, num_bags: float) -> float:
        return num_ids * _ID_BYTES + self._directions * num_bags * self.row_bytes

    def distributed(self, storage: str) -> Cost:
        """Returns what a table costs each rank if each row is on one of them."""
        ranks, link = self.topology.world_size, self.topology.link(storage)
        own = self.load.distinct(self.num_ids)
        owned = self.load.distinct(ranks * self.num_ids) / ranks
        lookup, update = self._work(self.num_ids, self.num_bags, owned, storage)
        exchange = 0.0
        if ranks > 1:
            sent = own * (ranks - 1) / ranks * (_ID_BYTES + self._directions * self.row_bytes)
            exchange = self.num_ids / (_DISTINCT_OF_GATHER * self._gather(storage)) + sent / link
        # By chance a rank has some rows more than another one.
        rows = self.load.num_rows / ranks
        rows = min(rows + 3 * math.sqrt(rows), self.load.num_rows) if ranks > 1 else rows
        return self._cost(rows, storage, lookup, update, exchange, self._link_bytes(self.num_ids, self.num_bags))

    def localized(self, storage: str) -> tuple[Cost, Cost]:
        """Returns what a table costs the rank that has all rows, and each other one."""
        ranks, link = self.topology.world_size, self.topology.link(storage)
        num_ids, num_bags = ranks * self.num_ids, ranks * self.num_bags
        lookup, update = self._work(num_ids, num_bags, self.load.distinct(num_ids), storage)
        served, outputs = (ranks - 1) * self.num_ids, self.num_bags * self.row_bytes
        # Outputs leave the owner, and gradients come to it.
        sent = self._directions * (ranks - 1) * outputs
        exchange = served / (_SERVED_OF_GATHER * self._gather(storage)) + sent / link
        own = self._link_bytes(self.num_ids, self.num_bags)
        owner = self._cost(self.load.num_rows, storage, lookup, update, exchange, own)
        ids = self.num_ids * _ID_BYTES / link if ranks > 1 else 0.0
        return owner, self._cost(0, storage, 0.0, 0.0, ids, own)

    def replicated(self, storage: str) -> Cost:
        """Returns what a table costs each rank if all have all rows."""
        ranks = self.topology.world_size
        own, union = self.load.distinct(self.num_ids), self.load.distinct(ranks * self.num_ids)
        lookup, update = self._work(self.num_ids, self.num_bags, own, storage, union)
        # Each rank sends the gradients of its rows to all others.
        sent = (ranks - 1) * own * (_ID_BYTES + self.row_bytes) if self.config.trainable else 0.0
        exchange = sent / self.topology.link(storage) if ranks > 1 else 0.0
        return self._cost(
            self.load.num_rows, storage, lookup, update, exchange, self._link_bytes(self.num_ids, self.num_bags)
        )
