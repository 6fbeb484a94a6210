"""The ranks that a plan is for."""

import dataclasses

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
        for name in ("world_size", "ranks_per_host"):
            value = getattr(self, name)
            if value is None and name != "world_size":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive int. Received: {name}={value!r}")
        for name in ("memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
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
        """Bytes of a host for tables, for each rank there."""
        of_host = 0.85 * self.hardware.host_memory if self.host_memory is None else self.host_memory
        return of_host / self.ranks_of_a_host

    @property
    def ranks_of_a_host(self) -> int:
        return min(self.ranks_per_host or self.world_size, self.world_size)

    @property
    def link(self) -> float:
        """Bytes that a rank sends to others, a second."""
        spans_hosts = self.ranks_of_a_host < self.world_size
        if spans_hosts or not self.has_devices:
            return self.hardware.network
        return self.hardware.link
