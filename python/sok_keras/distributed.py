"""Ranks: processes that train one model together, each on its part of a batch."""

import contextlib
import json
import sys
from typing import Any

import numpy as np

from sok_keras import _native as native
from sok_keras.startup import find_start

# Whether the program has connected the ranks as programs for Horovod do, and will call `init`, too.
_for_horovod = False
_STATIC_BYTES = 1 << 20  # a static table of at most so many bytes of rows is replicated


def init(
    comm_tool: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    timeout: float = 60.0,
    merge_blocks: int | None = None,
    exchange_dtype: str = "float32",
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
        comm_tool: Not needed; `"horovod"` is accepted for programs that were written for SparseOperationKit.
        rank: Number of this process, from 0.
        world_size: Number of processes.
        address: `"host:port"` of rank 0, which listens there.
        timeout: Seconds to wait for another rank, at the start and in every call.
        merge_blocks: Number of blocks in which the gradients of the global batch are merged, a multiple of the number of ranks. With the
            same `merge_blocks`, tables that are given the same output gradients in equal shares have the same bits, whatever the
            number of ranks. None: one block for each rank.
        exchange_dtype: Type in which rows of tables and their gradients travel between ranks: `"float32"` or `"bfloat16"`, which is half as
            much. Tables stay float32. All ranks must give the same. GPUs that reach each other's memory use float32 in any case.

    Raises:
        ValueError: If the arguments, or the variables, are wrong or incomplete, or if the ranks differ in `merge_blocks` or
            `exchange_dtype`.
        SokError: If `init` was called before, or if not all ranks have come within the timeout.
    """
    if comm_tool not in (None, "horovod"):
        raise ValueError(f'`comm_tool` must be None or "horovod". Received: comm_tool={comm_tool!r}')
    given = rank, world_size, address, timeout, merge_blocks, exchange_dtype
    if _for_horovod and given == (None, None, None, 60.0, None, "float32"):
        return
    start = find_start(rank, world_size, address, float(timeout))
    if exchange_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f'`exchange_dtype` must be "float32" or "bfloat16". Received: exchange_dtype={exchange_dtype!r}'
        )
    if start.world_size == 1 and merge_blocks is None:
        return
    place = (start.rank, start.world_size, start.address)
    native.connect_ranks(place, float(timeout), merge_blocks, start.mpi, exchange_dtype == "bfloat16")
    if start.world_size > 1:
        from sok_keras import backend

        # Steps that are under way need the others.
        backend.call_last(_leave)
        blocks = start.world_size if merge_blocks is None else merge_blocks
        _check_same(f"merge_blocks={blocks}, exchange_dtype={exchange_dtype!r}")
        backend.bind_gpu(local_rank())


def init_for_horovod() -> None:
    """Connects the ranks as `init` does. A later `init` without arguments does nothing."""
    global _for_horovod
    if not is_initialized():
        init()
    _for_horovod = True


def is_for_horovod() -> bool:
    """Whether `init_for_horovod` was called."""
    return _for_horovod


def _check_same(own: str) -> None:
    """Checks that all ranks have given the same arguments to `init`."""
    for other, given in enumerate(native.gather(own.encode())):
        if given.decode() != own:
            raise ValueError(
                "all ranks must give the same `merge_blocks` and `exchange_dtype` to `init`. "
                f"Received: {own} on rank {rank()}, {given.decode()} on rank {other}"
            )


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


def agree(error: Exception | None) -> None:
    """Ends a call that all ranks make. `error`: what it has raised on this rank.

    Raises:
        RankError: If the call has failed on another rank.
        Exception: `error`, if there is one.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    if error is not None:
        with contextlib.suppress(native.RankError):  # the others may be at another place
            native.gather(f"{type(error).__name__}: {error}".encode())
        raise error
    for other, failed in enumerate(native.gather(b"")):
        if failed:
            raise native.RankError(f"rank {other} failed: {failed.decode()}")


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
    return reductions[op](np.stack(_arrays_of_one_shape(value)), axis=0).astype(dtype)


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


def is_replicated_by_default(config: Any) -> bool:
    """Returns whether `placement="auto"` gives every rank all rows of a table."""
    num_ids = config.vocabulary_size
    return num_ids is not None and num_ids * config.embedding_dim * 4 <= _STATIC_BYTES


def core_placement(config: Any) -> Any:
    """Returns the place of a table's rows among the ranks, for the core."""
    placement = config.placement
    if placement.startswith("localized:"):
        return {"localized": int(placement.removeprefix("localized:"))}
    if placement in ("auto", "default_device"):
        return "replicated" if is_replicated_by_default(config) else "distributed"
    return placement


def _arrays_of_one_shape(value: np.ndarray) -> list[np.ndarray]:
    arrays = gather_arrays(value)
    for other, array in enumerate(arrays):
        if (array.shape, array.dtype) != (value.shape, value.dtype):
            raise native.RankError(
                f"rank {other} gives an array {array.shape} of {array.dtype}, but rank {rank()} one {value.shape} of {value.dtype}"
            )
    return arrays


def gather_arrays(value: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays of all ranks, which may differ in shape."""
    return [_from_bytes(part) for part in native.gather(_to_bytes(value))] if is_initialized() else [value]


def _to_bytes(array: np.ndarray) -> bytes:
    header = f"{array.dtype.str} {','.join(map(str, array.shape))}\n"
    return header.encode() + np.ascontiguousarray(array).tobytes()


def _from_bytes(data: bytes) -> np.ndarray:
    header, values = data.split(b"\n", 1)
    dtype, shape = header.decode().split(" ")
    return np.frombuffer(values, dtype).reshape([int(length) for length in shape.split(",") if length])
