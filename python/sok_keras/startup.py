"""How a process finds the other ranks."""

import contextlib
import functools
import os
import re
import socket
import sys
from typing import Any, NamedTuple

from sok_keras import mpi

_ADDRESS_KEY = "sok_keras/address_of_rank_0"


class Start(NamedTuple):
    """This process among the ranks."""

    rank: int
    world_size: int
    # Host and port of rank 0, which listens there.
    address: str
    # What carries messages, if it is MPI.
    mpi: tuple | None = None


def find_start(rank: int | None, world_size: int | None, address: str | None, timeout: float) -> Start:
    """Returns this process among the ranks, by the arguments of `init` or by what has started it.

    Raises:
        ValueError: If the arguments, or the variables, are wrong or incomplete.
    """
    given = {"rank": rank, "world_size": world_size, "address": address}
    if any(value is not None for value in given.values()):
        missing = [name for name, value in given.items() if value is None]
        if missing and world_size != 1:
            raise ValueError(
                f"`rank`, `world_size` and `address` must be given together. Missing: {', '.join(missing)}"
            )
        return _by_tcp(_checked(rank or 0, world_size, address or "", "`rank` and `world_size`"))
    for find in (_of_torch, functools.partial(_of_jax, timeout), _of_mpi, _of_variables, _of_slurm):
        start = find()
        if start is not None:
            return start if find is _of_mpi else _by_tcp(start)
    return _by_tcp(Start(0, 1, ""))


def _by_tcp(start: Start) -> Start:
    mpi.check_exchange(os.environ.get("SOK_EXCHANGE"))
    if mpi.wants_mpi() and start.world_size > 1:
        raise ValueError(
            "SOK_EXCHANGE=mpi is for ranks that `mpi4py` finds. These were found by arguments of `init`, by a framework or by variables"
        )
    return start


def _checked(rank: Any, world_size: Any, address: str, what: str) -> Start:
    if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
        raise ValueError(
            f"{what} must be a rank from 0 and the number of ranks above it. Received: {rank!r} and {world_size!r}"
        )
    return Start(rank, world_size, address)


def own_address(*names: str | None) -> str:
    """Returns an address where this process can listen, of an unused port. `names`: names of hosts by which ranks have reached one of
    them, which may be this host."""
    hosts = [(name, True) for name in names if name]
    # Many hosts have an address for their own name that others cannot use, 127.0.1.1.
    hosts += [(socket.gethostname(), False), (_address_to_others(), False), ("127.0.0.1", True)]
    for name, may_be_loopback in hosts:
        with contextlib.suppress(OSError), socket.socket() as listener:
            host = socket.gethostbyname(name)
            if may_be_loopback or not host.startswith("127."):
                listener.bind((host, 0))
                return f"{host}:{listener.getsockname()[1]}"
    raise OSError("this host has no address on which a process can listen")


def _address_to_others() -> str:
    """Returns the address with which this host reaches others."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as sender:
        sender.connect(("192.0.2.1", 9))  # chooses a way, and sends nothing (RFC 5737: nobody has this address)
        return sender.getsockname()[0]
    return "127.0.0.1"


def _of_torch() -> Start | None:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    rank, world_size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    address = [own_address(os.environ.get("MASTER_ADDR")) if rank == 0 else ""]
    torch_distributed.broadcast_object_list(address, src=0)
    return Start(rank, world_size, address[0])


def _of_jax(timeout: float) -> Start | None:
    """Takes nothing but the store of keys and values of `jax.distributed`: what JAX computes would take a GPU."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return None
    from sok_keras.backend import private_jax

    state: Any = private_jax.distributed_state
    if state.process_id == 0:
        address = own_address(state.coordinator_address.rpartition(":")[0])
        state.client.key_value_set(_ADDRESS_KEY, address, allow_overwrite=True)
    else:
        address = state.client.blocking_key_value_get(_ADDRESS_KEY, int(1000 * timeout))
    return Start(state.process_id, state.num_processes, address)


def _of_mpi() -> Start | None:
    found = mpi.find(own_address)
    return None if found is None else Start(*found)


def _of_variables() -> Start | None:
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


def _of_slurm() -> Start | None:
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
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be an integer of at least 0. Received: {name}={text!r}")
    return int(text)
