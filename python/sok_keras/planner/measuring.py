"""Figures of the hardware at hand."""

import concurrent.futures
import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from sok_keras import _native as native
from sok_keras import backend, distributed
from sok_keras.feature_config import FeatureConfig
from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.planner.hardware import H200, IDS_OF_GATHER, Hardware
from sok_keras.table_config import TableConfig

_REPEATS = 7
# Floats of a row of 64 bytes.
_ROW = 16
# As many lookups of a few ids as take the time of a training step that does no work. Fitted to an H200 (`benches/results/planner.md`).
_LOOKUPS_OF_LAUNCH = 1.26
_SENT = 4 * 2**20


def measure(name: str = "measured", memory: float | None = None, size: int | None = None) -> Hardware:
    """Measures the device and the host of rank 0, and with ranks the network and the link of their GPUs. Takes some seconds. All ranks must call it, and get the same.

    `link_latency` and `host_launch` are those of an `H200`, and without ranks `link` and `network` are. They can be set with
    `dataclasses.replace(hardware, link=...)`.

    Args:
        name: Name of the returned figures.
        memory: Bytes of the device. It must be given where there is a GPU.
        size: Bytes that are copied and gathered from. None: 2**30 with a GPU, 2**26 without one.

    Returns:
        A `Hardware`, with `memory=0` without a GPU.
    """
    has_device = backend.gpu() is not None
    if has_device and memory is None:
        raise ValueError("`memory` must be given where there is a GPU: its bytes. Received: memory=None")
    size = 2 ** (30 if has_device else 26) if size is None else size
    if not isinstance(size, int) or size < 2**20:
        raise ValueError(f"`size` must be an int of at least 2**20 bytes. Received: size={size!r}")
    network = _network() if distributed.world_size() > 1 else H200.network
    hardware = dataclasses.replace(H200, name=name, network=network, memory=float(memory or 0.0) if has_device else 0.0)
    if has_device:
        hardware = _with_device(hardware, size)
    if distributed.rank() == 0:
        of_host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        hardware = dataclasses.replace(hardware, host_memory=of_host, host_gather=_host_gather(size))
    # The others wait here, so that rank 0 has the host for itself.
    return Hardware(**distributed.of_rank_0(dataclasses.asdict(hardware)))


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes: the shortest of several, since others may use the machine too."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _places(num_rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, num_rows, max(num_rows // 4, 1))


def _host_gather(size: int) -> float:
    rows = np.ones((size // (4 * _ROW), _ROW), "float32")
    parts = [
        (some, np.empty((len(some), _ROW), "float32"))
        for some in np.array_split(_places(len(rows)), os.cpu_count() or 1)
    ]

    def gather(part: tuple[np.ndarray, np.ndarray]) -> None:
        # With mode "clip" NumPy writes to `out` without a copy.
        np.take(rows, part[0], axis=0, out=part[1], mode="clip")

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
        return sum(len(some) for some, _ in parts) / _seconds(lambda: list(threads.map(gather, parts)))


def _network() -> float:
    sent = [bytes(_SENT)] * distributed.world_size()
    return _SENT * (distributed.world_size() - 1) / _seconds(lambda: native.exchange(sent, None))


def _with_device(hardware: Hardware, size: int) -> Hardware:
    """Returns the figures with those of the device."""

    def wait(x: Any) -> None:
        ops.convert_to_numpy(x[:1])

    values = ops.ones((size // 4,), "float32")
    small = ops.ones((1,), "float32")

    waiting = _seconds(lambda: wait(small))

    def beyond_waiting(call: Callable[[], Any]) -> float:
        return max(_seconds(call) - waiting, 1e-6)

    given = np.ones(size // 4, "float32")
    copy = 2 * size / beyond_waiting(lambda: wait(values * 2.0))
    if (ranks := distributed.world_size()) > 1:
        # A rank sends its part of the vector to each other one, and each other one the sums of its part.
        sent = 2 * size * (ranks - 1) / ranks
        hardware = dataclasses.replace(
            hardware, link=sent / beyond_waiting(lambda: wait(backend.sum_gradients(values, small)[0]))
        )
    num_ids = size // (16 * _ROW)
    layer = _layer(num_ids)
    return dataclasses.replace(
        hardware,
        copy=copy,
        gather=_gather(layer, num_ids, copy, wait),
        launch=_launch(layer),
        host_link=size / beyond_waiting(lambda: wait(ops.convert_to_tensor(given))),
    )


def _layer(num_rows: int) -> DistributedEmbedding:
    """Returns a layer with a table of so many rows, of which each rank has all."""
    table = TableConfig("measured", num_rows, _ROW, placement="replicated")
    layer = DistributedEmbedding({"measured": FeatureConfig("measured", table)}, name="measured")
    layer.build()
    layer.get_tables()["measured"].find_or_insert(np.arange(num_rows))
    return layer


def _random_ids(num_rows: int, count: int) -> Any:
    return ops.convert_to_tensor(np.random.default_rng(1).integers(0, num_rows, count).astype("int32"))


def _launch(layer: DistributedEmbedding) -> float:
    """Returns the seconds of a step that does no work. From Python they cannot be told from those of the framework."""
    ids, core = _random_ids(1, 1), layer._core
    layer({"measured": ids}, training=False)
    core.wait_for_steps()
    core.group.measure(True)
    try:
        for _ in range(_REPEATS):
            layer({"measured": ids}, training=False)
        core.wait_for_steps()
        seconds = sum(seconds for _, _, seconds in core.group.take_profile())
    finally:
        core.group.measure(False)
    return _LOOKUPS_OF_LAUNCH * max(seconds, 1e-6) / _REPEATS


def _gather(layer: DistributedEmbedding, num_ids: int, copy: float, wait: Callable[[Any], None]) -> float:
    """Returns the `gather` with which `CostModel` predicts the time that a lookup of this package takes.

    A gather of a framework says little: PyTorch's takes ten times as long on an H200.

    Args:
        layer: A layer with a table of so many rows.
        num_ids: Ids of a lookup, and rows of the table.
        copy: Bytes a second.
        wait: Waits for a tensor.
    """

    def lookup(count: int) -> float:
        ids = _random_ids(num_ids, count)
        return _seconds(lambda: wait(layer({"measured": ids}, training=False)["measured"]))

    # A lookup of few ids takes the framework as long.
    seconds = lookup(num_ids) - lookup(num_ids // 64)
    num_ids -= num_ids // 64
    # Outputs are written, and distinct rows read.
    num_bytes = 4 * _ROW * num_ids * (2 - math.exp(-1))
    return num_ids / (2 * IDS_OF_GATHER * max(seconds - num_bytes / copy, 1e-6))
