"""Ranks: processes that train one model together, each on its part of a batch."""

import contextlib
import json
import os
import re
import socket
import sys
from typing import Any, NamedTuple

import numpy as np

from sok_keras import _native as native
from sok_keras import mpi

_STATIC_BYTES = 1 << 20  # a static table of at most so many bytes of rows is replicated


class _Start(NamedTuple):
    """How a process finds the others."""

    rank: int
    world_size: int
    address: str
    mpi: tuple | None = None  # handles of the MPI that carries messages


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    timeout: float = 60.0,
    merge_blocks: int | None = None,
) -> None:
    """Connects this process with the other ranks. Call it first, before a layer is made.

    All ranks run the same program. Each uses one device and trains on its part of the global batch. Their embedding tables are shared,
    and their dense variables stay equal. Calls of a model are collective: all ranks must make them, in the same order.

    Without arguments the ranks are those of, in this order: `torch.distributed` or `jax.distributed` if it is initialized; `mpi4py` if
    it is imported or the process was started by `mpirun`; the variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, which
    `torchrun` and `python -m sok_keras.launch` set; SLURM's variables. Otherwise the process is alone.

    Messages go by TCP, or by MPI if `mpi4py` has found the ranks. The variable `SOK_EXCHANGE`, `tcp` or `mpi`, says otherwise. GPUs read
    each other's memory, or exchange rows by NCCL if they cannot reach it, or if `SOK_EXCHANGE` is `nccl`.

    Example:

    >>> import sok_keras as sok
    >>> sok.rank(), sok.world_size()
    (0, 1)

    Args:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        address: `"host:port"` of rank 0, which listens there.
        timeout: Seconds to wait for another rank, at the start and in every call.
        merge_blocks: Number of blocks in which the gradients of the global batch are merged, a multiple of the number of ranks. With the
            same `merge_blocks`, tables that are given the same output gradients in equal shares have the same bits, whatever the
            number of ranks. None: one block for each rank.

    Raises:
        ValueError: If the arguments, or the variables, are wrong or incomplete.
        SokError: If `init` was called before, or if not all ranks have come within the timeout.
    """
    start = _start(rank, world_size, address)
    if start.world_size == 1 and merge_blocks is None:
        return
    native.connect_ranks(start.rank, start.world_size, start.address, float(timeout), merge_blocks, start.mpi)
    if start.world_size > 1:
        from sok_keras import backend

        # Steps that are under way need the others.
        backend.call_last(_leave)
        backend.bind_gpu(local_rank())


def _leave() -> None:
    # Ranks that do not end by themselves may be ended by MPI, with this one.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream may be anything that a program has put there
            stream.flush()
    native.leave_ranks()


def is_initialized() -> bool:
    """Whether `init` has connected this process, or has set `merge_blocks`."""
    return native.ranks() is not None


def rank() -> int:
    """Returns the number of this process, from 0. It is 0 without `init`."""
    ranks = native.ranks()
    return ranks[0] if ranks else 0


def world_size() -> int:
    """Returns the number of ranks. It is 1 without `init`."""
    ranks = native.ranks()
    return ranks[1] if ranks else 1


def size() -> int:
    """Returns the number of ranks, as `world_size`."""
    return world_size()


def local_rank() -> int:
    """Returns the number of this process among the ranks on its host, from 0."""
    ranks = native.ranks()
    return ranks[2] if ranks else 0


def barrier() -> None:
    """Waits until all ranks have called it.

    Raises:
        RankError: If another rank does not come within the timeout, or is lost.
    """
    if is_initialized():
        native.barrier()


def all_reduce(value: Any, op: str = "sum") -> np.ndarray:
    """Reduces an array over all ranks, which must give arrays of the same shape.

    Args:
        value: A number or an array.
        op: `"sum"`, `"mean"`, `"min"` or `"max"`.

    Returns:
        The reduced array, the same on all ranks, in the dtype of `value`; a mean of integers is float64.

    Raises:
        RankError: If another rank has another shape or dtype, does not come within the timeout, or is lost.
        ValueError: If `op` is another one.
    """
    reductions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}
    if op not in reductions:
        raise ValueError(f'`op` must be "sum", "mean", "min" or "max". Received: op={op!r}')
    value = np.asarray(value)
    dtype = value.dtype if op != "mean" or value.dtype.kind == "f" else np.dtype("float64")
    return reductions[op](np.stack(_gather_arrays(value)), axis=0).astype(dtype)


def broadcast(value: Any, root: int = 0) -> np.ndarray:
    """Returns the array of rank `root` on all ranks. The values of other ranks are not read.

    Args:
        value: A number or an array.
        root: The rank.

    Raises:
        RankError: If a rank does not come within the timeout, or is lost.
        ValueError: If `root` is no rank.
    """
    value = np.asarray(value)
    if not is_initialized():
        if root != 0:
            raise ValueError(f"`root` must be a rank, 0. Received: root={root!r}")
        return value
    return _from_bytes(native.broadcast(_to_bytes(value) if rank() == root else b"", root))


def equalize(variables: list) -> None:
    """Gives Keras variables the values of rank 0.

    Raises:
        RankError: If the variables of a rank have other shapes.
    """
    if world_size() == 1 or not variables:
        return
    from sok_keras import backend

    shapes = repr([(tuple(variable.shape), str(variable.dtype)) for variable in variables])
    for other, text in enumerate(native.gather(shapes.encode())):
        if text.decode() != shapes:
            raise native.RankError(f"rank {other} trains another model: its variables have other shapes")
    values = [np.ascontiguousarray(backend.to_numpy(variable.value)) for variable in variables]
    sent = b"".join(value.tobytes() for value in values) if rank() == 0 else b""
    received, start = native.broadcast(sent, 0), 0
    for variable, value in zip(variables, values, strict=True):
        end = start + value.nbytes
        variable.assign(backend.from_numpy(np.frombuffer(received[start:end], value.dtype).reshape(value.shape)))
        start = end


def of_rank_0(value: Any) -> Any:
    """Returns the JSON value that rank 0 gives, so that all ranks decide alike."""
    if world_size() == 1:
        return value
    return json.loads(native.broadcast(json.dumps(value).encode() if rank() == 0 else b"", 0))


def core_placement(config: Any) -> Any:
    """Returns the place of a table's rows among the ranks, for the core."""
    placement, num_ids = config.placement, config.vocabulary_size
    if placement.startswith("localized:"):
        return {"localized": int(placement.removeprefix("localized:"))}
    if placement in ("auto", "default_device"):
        is_small = num_ids is not None and num_ids * config.embedding_dim * 4 <= _STATIC_BYTES
        return "replicated" if is_small else "distributed"
    return placement


def _gather_arrays(value: np.ndarray) -> list[np.ndarray]:
    if not is_initialized():
        return [value]
    arrays = [_from_bytes(part) for part in native.gather(_to_bytes(value))]
    for other, array in enumerate(arrays):
        if (array.shape, array.dtype) != (value.shape, value.dtype):
            raise native.RankError(
                f"rank {other} gives an array {array.shape} of {array.dtype}, but rank {rank()} one {value.shape} of {value.dtype}"
            )
    return arrays


def _to_bytes(array: np.ndarray) -> bytes:
    header = f"{array.dtype.str} {','.join(map(str, array.shape))}\n"
    return header.encode() + np.ascontiguousarray(array).tobytes()


def _from_bytes(data: bytes) -> np.ndarray:
    header, values = data.split(b"\n", 1)
    dtype, shape = header.decode().split(" ")
    return np.frombuffer(values, dtype).reshape([int(length) for length in shape.split(",") if length])


# ---- how a process finds the others


def _start(rank: int | None, world_size: int | None, address: str | None) -> _Start:
    given = {"rank": rank, "world_size": world_size, "address": address}
    if any(value is not None for value in given.values()):
        missing = [name for name, value in given.items() if value is None]
        if missing and world_size != 1:
            raise ValueError(
                f"`rank`, `world_size` and `address` must be given together. Missing: {', '.join(missing)}"
            )
        return _by_tcp(_checked(rank or 0, world_size, address or "", "`rank` and `world_size`"))
    for find in (_of_torch, _of_jax, _of_mpi, _of_variables, _of_slurm):
        start = find()
        if start is not None:
            return start if find is _of_mpi else _by_tcp(start)
    return _by_tcp(_Start(0, 1, ""))


def _by_tcp(start: _Start) -> _Start:
    mpi.check_exchange(os.environ.get("SOK_EXCHANGE"))
    if mpi.wants_mpi() and start.world_size > 1:
        raise ValueError(
            "SOK_EXCHANGE=mpi is for ranks that `mpi4py` finds. These were found by arguments of `init`, by a framework or by variables"
        )
    return start


def _checked(rank: Any, world_size: Any, address: str, what: str) -> _Start:
    if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
        raise ValueError(
            f"{what} must be a rank from 0 and the number of ranks above it. Received: {rank!r} and {world_size!r}"
        )
    return _Start(rank, world_size, address)


def _own_address() -> str:
    """An address of this host with a free port."""
    name = socket.gethostname()
    try:
        host = socket.gethostbyname(name)
    except OSError:
        host = "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


def _of_torch() -> _Start | None:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    rank, world_size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    address = [_own_address() if rank == 0 else ""]
    torch_distributed.broadcast_object_list(address, src=0)
    return _Start(rank, world_size, address[0])


def _of_jax() -> _Start | None:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return None
    from jax.experimental import multihost_utils

    address = (_own_address() if jax.process_index() == 0 else "").encode().ljust(64)
    address = multihost_utils.broadcast_one_to_all(np.frombuffer(address, "uint8"))
    return _Start(jax.process_index(), jax.process_count(), bytes(np.asarray(address)).decode().strip())


def _of_mpi() -> _Start | None:
    found = mpi.find(_own_address)
    return None if found is None else _Start(*found)


def _of_variables() -> _Start | None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return None
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"The variables {', '.join(names)} must be set together. Missing: {', '.join(missing)}")
    numbers = {name: _number(name, found[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    # torchrun itself listens at MASTER_PORT.
    port = numbers["MASTER_PORT"] + (0 if "SOK_LAUNCH" in os.environ else 1)
    address = f"{found['MASTER_ADDR']}:{port}"
    return _checked(numbers["RANK"], numbers["WORLD_SIZE"], address, "RANK and WORLD_SIZE")


def _of_slurm() -> _Start | None:
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_NUM_TASKS" not in os.environ:
        return None
    rank = _number("SLURM_PROCID", os.environ["SLURM_PROCID"])
    world_size = _number("SLURM_STEP_NUM_TASKS", os.environ["SLURM_STEP_NUM_TASKS"])
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "localhost")
    job = _number("SLURM_JOB_ID", os.environ.get("SLURM_JOB_ID", "0"))
    return _checked(
        rank, world_size, f"{_first_node(nodes)}:{20_000 + job % 10_000}", "SLURM_PROCID and SLURM_STEP_NUM_TASKS"
    )


def _first_node(nodes: str) -> str:
    """`gpu03` of `gpu[03-05,9],other`."""
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return nodes if first is None else first[1] + (first[2] or "")


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be an integer of at least 0. Received: {name}={text!r}")
    return int(text)
