"""The ranks that a plan is for."""

import dataclasses

import numpy as np

from sok_keras.planner.hardware import H200, Hardware


@dataclasses.dataclass(frozen=True)
class Topology:
    """Ranks, and what each has.

    Args:
        world_size: Number of ranks.
        hardware: Figures of each rank's device and host: `H100`, `H200`, what `measure()` returns, or a `Hardware`.
        ranks_per_host: Ranks that share a host. None: all.
        memory: Bytes of each device for tables. None: 85 % of the device. The rest is the model's, and that of batches.
        host_memory: Bytes of each host for tables. None: 85 % of the host.
    """

    world_size: int = 1
    hardware: Hardware = H200
    ranks_per_host: int | None = None
    memory: float | None = None
    host_memory: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hardware, Hardware):
            raise ValueError(f"`hardware` must be a `Hardware`. Received: hardware={self.hardware!r}")
        for name in ("world_size", "ranks_per_host"):
            value = getattr(self, name)
            if value is None and name != "world_size":
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be a positive int. Received: {name}={value!r}")
        for name in ("memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float | np.number) and value >= 0):
                raise ValueError(f"`{name}` must be a number of bytes or None. Received: {name}={value!r}")

    @property
    def has_devices(self) -> bool:
        return self.hardware.memory > 0

    @property
    def budget(self) -> float:
        """Bytes of a device for tables."""
        return 0.85 * self.hardware.memory if self.memory is None else self.memory

    @property
    def host_budget(self) -> float:
        """Bytes of a host for the tables of all its ranks."""
        return 0.85 * self.hardware.host_memory if self.host_memory is None else self.host_memory

    @property
    def ranks_of_a_host(self) -> int:
        return min(self.ranks_per_host or self.world_size, self.world_size)

    def host_of(self, rank: int) -> int:
        """Returns the number of a rank's host."""
        return rank // self.ranks_of_a_host

    @property
    def num_hosts(self) -> int:
        return self.host_of(self.world_size - 1) + 1

    def link(self, storage: str) -> float:
        """Returns the bytes that a rank sends to others, a second, of tables in this storage. Hosts send by the network, also to themselves."""
        return self.hardware.link if storage == "hbm" and self.num_hosts == 1 else self.hardware.network
