"""Two ranks of `mpirun` that exchange messages, and end in several ways. Without Keras, so that they start fast."""

import atexit
import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback

import numpy as np

from sok_keras import _native as native
from sok_keras import mpi

TIMEOUT = 1.5


def connect(timeout=30.0):
    found = mpi.find(address)
    native.connect_ranks((found.rank, found.world_size, found.address), timeout, None, found.handles)
    atexit.register(native.leave_ranks)
    return found.rank


def address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def is_by_mpi():
    """The thread that helps with messages of MPI is there. It has its name soon after it starts."""
    for _ in range(100):
        if "sok-messages\n" in names_of_threads():
            return True
        time.sleep(0.01)
    return False


def write_at_once(file, text):
    """The launcher mixes lines of ranks that are written in parts."""
    os.write(file, text.encode())


def names_of_threads():
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            yield path.read_text()


def sizes():
    """Empty messages, short ones, those at the borders of how they are sent, and some of several pieces."""
    rank = connect()
    for size in (0, 1, 2, 32_767, 32_768, 32_769, 1 << 20, 100_000_000, (64 << 20) - 1, 64 << 20, (128 << 20) + 5):
        parts = [np.full(size, 7 * rank + to, "uint8").tobytes() for to in range(2)]
        for of_rank, part in enumerate(native.exchange(parts, None)):
            assert len(part) == size
            assert not size or set(part[:: max(1, size // 1000)]) | {part[-1]} == {7 * of_rank + rank}


def threads():
    """Kinds of calls are numbered apart, so a thread for each, on each rank at a pace of its own."""
    rank, failed = connect(), []

    def gather(step):
        assert [len(part) for part in native.gather(bytes(step * (rank + 1)))] == [step, 2 * step]

    def broadcast(step):
        assert native.broadcast(bytes([step]) * (step * 1000), step % 2) == bytes([step]) * (step * 1000)

    def add(step):
        assert (native.sum(np.full(step * 1000, rank + 1, "float32")) == 3).all()

    def exchange(step):
        assert native.exchange([bytes([rank, step, to]) for to in range(2)], None)[1 - rank] == bytes(
            [1 - rank, step, rank]
        )

    def run(call, seed):
        draw = np.random.default_rng(seed)
        try:
            for step in range(100):
                if draw.random() < 0.1:
                    time.sleep(draw.random() / 200)
                call(step)
        except BaseException as error:
            failed.append(error)
            raise

    calls = (gather, broadcast, add, exchange, lambda step: native.barrier())
    running = [threading.Thread(target=run, args=(call, 10 * rank + seed)) for seed, call in enumerate(calls)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed


def transport():
    """Tells what carries messages."""
    if "funneled" in sys.argv:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
    rank = connect()
    native.barrier()
    write_at_once(1, f"rank {rank} by mpi: {is_by_mpi()}\n")


def wait_in_vain(rank, seconds):
    """Rank 0 waits for rank 1, to which a long message is on its way. Both end by themselves, or are ended."""
    started = time.monotonic()
    try:
        native.gather(bytes(20_000_000))
    except native.RankError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - started < seconds
        print("heard", flush=True)


def other_raises():
    rank = connect()
    native.barrier()
    if rank == 1:
        raise ValueError("a program of a user has failed")
    wait_in_vain(rank, 2 * TIMEOUT)


def end_rank_1(sent):
    """Rank 1 gets a signal."""
    rank = connect(TIMEOUT)
    native.barrier()
    if rank == 1:
        os.kill(os.getpid(), sent)
    wait_in_vain(rank, 2 * TIMEOUT)


def other_stops():
    end_rank_1(signal.SIGSTOP)


def other_is_killed():
    end_rank_1(signal.SIGKILL)


def other_ends_late():
    """The last message of rank 0 is still taken when rank 0 has ended."""
    rank = connect()
    if rank == 1:
        time.sleep(1)
    native.gather(bytes(5_000_000))
    if rank == 1:
        time.sleep(2 * TIMEOUT)
        print("late", flush=True)


def finalized():
    """The program itself finalizes MPI, first."""
    from mpi4py import MPI

    connect(TIMEOUT)
    native.barrier()
    MPI.Finalize()


def forked():
    """A child is no rank, and its end is not that of one."""
    rank = connect()
    native.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            native.barrier()
        except native.SokError as error:
            status = 0 if "was forked from rank" in str(error) else 2
        native.leave_ranks()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert native.gather(bytes([rank])) == [b"\0", b"\1"]


if __name__ == "__main__":
    sys.excepthook = lambda *error: write_at_once(2, "".join(traceback.format_exception(*error)))
    globals()[sys.argv[1]]()
