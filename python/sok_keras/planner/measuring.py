"""Figures of the hardware at hand."""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from sok_keras import _native as native
from sok_keras import backend, distributed
from sok_keras.planner.hardware import H200, Hardware

_REPEATS = 7
# Floats of a row of 64 bytes.
_ROW = 16
# Kernels that a training step of tables launches, more or less.
_LAUNCHES = 12
_SENT = 4 * 2**20


def measure(name: str = "measured", size: int = 2**26) -> Hardware:
    """Measures this process's device and host, and with ranks the connection between them. Takes some seconds. All ranks must call it.

    What cannot be measured is as for an `H200`: the memory of a device and the link between devices. Give them with
    `dataclasses.replace(hardware, memory=..., link=...)`.

    Args:
        name: Name of the returned figures.
        size: Bytes that are copied and gathered from.

    Returns:
        A `Hardware`, with `memory=0` without a GPU.
    """
    if not isinstance(size, int) or size < 2**20:
        raise ValueError(f"`size` must be an int of at least 2**20 bytes. Received: size={size!r}")
    hardware = dataclasses.replace(
        H200,
        name=name,
        host_memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        host_gather=_host_gather(size),
        network=_network() if distributed.world_size() > 1 else H200.network,
    )
    if backend.gpu() is None:
        return dataclasses.replace(hardware, memory=0.0)
    return _with_device(hardware, size)


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
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
        # With mode "clip" NumPy writes to `out` without a copy.
        gather = lambda part: np.take(rows, part[0], axis=0, out=part[1], mode="clip")  # noqa: E731
        return sum(len(some) for some, _ in parts) / _seconds(lambda: list(threads.map(gather, parts)))


def _network() -> float:
    sent = [bytes(_SENT)] * distributed.world_size()
    return _SENT * (distributed.world_size() - 1) / _seconds(lambda: native.exchange(sent, None))


def _with_device(hardware: Hardware, size: int) -> Hardware:
    """Returns the figures with those of the device."""

    def wait(x: Any) -> None:
        keras.ops.convert_to_numpy(ops.ravel(x)[:1])

    values = ops.ones((size // (4 * _ROW), _ROW), "float32")
    places = ops.convert_to_tensor(_places(values.shape[0]))
    small = ops.ones((1,), "float32")

    def steps() -> None:
        x = small
        for _ in range(_LAUNCHES):
            x = x + 1.0
        wait(x)

    waiting = _seconds(lambda: wait(small))
    given = np.ones(size // 4, "float32")
    return dataclasses.replace(
        hardware,
        copy=2 * size / (_seconds(lambda: wait(values * 2.0)) - waiting),
        gather=places.shape[0] / (_seconds(lambda: wait(ops.take(values, places, axis=0))) - waiting),
        launch=max(_seconds(steps) - waiting, 1e-6),
        host_link=size / (_seconds(lambda: wait(ops.convert_to_tensor(given))) - waiting),
    )
