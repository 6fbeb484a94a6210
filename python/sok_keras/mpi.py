"""Ranks that `mpirun` started: how they find each other by mpi4py, and whether MPI carries their messages."""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# What mpi4py is imported for, if the program itself has not done so.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


class Found(NamedTuple):
    """Ranks that mpi4py has found. `handles`: those of MPI, for the core; None if messages go by TCP."""

    rank: int
    world_size: int
    address: str
    handles: tuple | None


def wants_mpi() -> bool:
    """Whether the user has asked for MPI between ranks."""
    return os.environ.get("SOK_EXCHANGE") == "mpi"


def find(own_address: Callable[[], str]) -> Found | None:
    """Returns this process among those of `mpirun`, or None if there was no `mpirun`. Collective.

    Args:
        own_address: Returns an address where this process can listen.

    Raises:
        ValueError: If `mpi4py` is missing, or if `SOK_EXCHANGE` is another word or asks for what this MPI cannot do.
    """
    if "mpi4py.MPI" not in sys.modules and not wants_mpi() and not any(name in os.environ for name in _SIZES):
        return None
    try:
        from mpi4py import MPI
    except ImportError as error:
        started = "SOK_EXCHANGE=mpi" if wants_mpi() else "This process was started by `mpirun`. It"
        raise ValueError(
            f"{started} needs `mpi4py`, which is not installed or finds no MPI, so the ranks cannot find each other. Install it, or "
            "start the ranks by `python -m sok_keras.launch`"
        ) from error
    world = MPI.COMM_WORLD
    if world.size == 1 and not any(name in os.environ for name in _SIZES):
        return None  # no `mpirun`: variables may say who the ranks are
    own = (own_address() if world.rank == 0 else "", os.environ.get("SOK_EXCHANGE"), _objection(MPI))
    # All ranks see the same, so that either none raises or all do: one alone would leave the others in a call of MPI.
    told = world.allgather(own)
    address, exchange, _ = told[0]
    check_exchange(exchange)
    objection = next((text for _, _, text in told if text), None)
    if exchange == "mpi" and objection:
        raise ValueError(f"SOK_EXCHANGE=mpi: {objection}")
    is_mpi = world.size > 1 and exchange != "tcp" and not objection
    return Found(world.rank, world.size, address, _handles(MPI) if is_mpi else None)


def check_exchange(exchange: str | None) -> None:
    """Raises ValueError for a value of `SOK_EXCHANGE` that is none."""
    if exchange not in (None, "tcp", "mpi", "nccl"):
        raise ValueError(f'SOK_EXCHANGE must be "tcp", "mpi" or "nccl". Received: SOK_EXCHANGE={exchange!r}')


def _objection(MPI: Any) -> str | None:
    """Why MPI cannot carry messages, if it cannot."""
    if not hasattr(MPI, "_handleof"):
        return "messages by MPI need mpi4py 4 or newer"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "messages by MPI need the thread level MPI_THREAD_MULTIPLE, which mpi4py asks for unless `mpi4py.rc` says otherwise"
    return None


def _handles(MPI: Any) -> tuple:
    communicator = MPI.COMM_WORLD.Dup()
    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    handles = [MPI._handleof(handle) % 2**64 for handle in (communicator, MPI.BYTE)]
    return (MPI.__file__, MPI._sizeof(MPI.Comm), *handles, int(MPI.ANY_SOURCE))
