"""Figures of the hardware that a plan is for."""

import dataclasses

_GIB = 2**30
# Ids a second that a step looks up, sorts and merges, divided by `Hardware.gather`. Fitted to measured steps (`benches/results/planner.md`).
IDS_OF_GATHER = 0.42


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Figures of a rank's device and of its host.

    A rank without a GPU has `memory=0`. Its tables are on the host then.

    Args:
        name: Name, for reports.
        memory: Memory of a device in bytes; 0 without one.
        copy: Bytes that a copy on the device reads and writes, a second.
        gather: Random rows of 64 bytes that the device reads and writes, a second.
        launch: Seconds of a training step that does no work.
        link: Bytes that a device sends to another one, a second, while it receives as many.
        link_latency: Seconds that an exchange takes for each other rank.
        host_memory: Memory of a host in bytes.
        host_gather: As `gather`, of the host's processors.
        host_launch: As `launch`, of tables on the host.
        host_link: Bytes between a device and its host, a second.
        network: As `link`, between hosts.
    """

    name: str
    memory: float
    copy: float
    gather: float
    launch: float
    link: float
    link_latency: float
    host_memory: float
    host_gather: float
    host_launch: float
    host_link: float
    network: float

    def __post_init__(self) -> None:
        may_be_zero = ("memory", "launch", "link_latency", "host_launch")
        device = ("copy", "gather", "link", "host_link")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            is_unused = field.name in may_be_zero or (self.memory == 0 and field.name in device)
            if not value >= 0 or (value == 0 and not is_unused):
                raise ValueError(f"`{field.name}` must be a positive number. Received: {field.name}={value!r}")


# Fitted to measured steps (`benches/results/planner.md`). The gather and the launch of the host are estimates for 16 cores, and the network is a
# card of 400 Gbit/s by its datasheet.
H200 = Hardware(
    name="H200",
    memory=139 * _GIB,
    copy=4.46e12,
    gather=18.4e9,
    launch=58e-6,
    link=350e9,
    link_latency=45e-6,
    host_memory=1024 * _GIB,
    host_gather=0.5e9,
    host_launch=100e-6,
    host_link=55e9,
    network=50e9,
)
H100 = dataclasses.replace(H200, name="H100", memory=79 * _GIB, copy=3.1e12, gather=15.7e9)
