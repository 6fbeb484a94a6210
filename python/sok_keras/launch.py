"""Starts a program as several ranks on this host: `python -m sok_keras.launch -n 2 train.py --epochs 3`."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

_PATIENCE = 10.0  # seconds that ranks have to end by themselves after one has failed


def main() -> int:
    """Runs the ranks. Returns the exit status of the first one that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m sok_keras.launch", description=__doc__)
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    given = parser.parse_args()
    if given.n < 1:
        parser.error(f"-n must be at least 1. Received: {given.n}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [_start(rank, given, port) for rank in range(given.n)]
    try:
        return _wait(ranks)
    except KeyboardInterrupt:
        _end(ranks, signal.SIGINT)
        return 128 + signal.SIGINT


def _start(rank: int, given: argparse.Namespace, port: int) -> subprocess.Popen:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(given.n),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SOK_LAUNCH": "1",
    }
    return subprocess.Popen([sys.executable, given.program, *given.arguments], env={**os.environ, **variables})


def _wait(ranks: list[subprocess.Popen]) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:
            _end(ranks, signal.SIGTERM)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen], number: int) -> None:
    """Ends all ranks: those that hear of a lost one by themselves, the others by a signal."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for stop in (number, signal.SIGKILL):
        left = [rank for rank in ranks if rank.poll() is None]
        for rank in left:
            rank.send_signal(stop)
        for rank in left:
            try:
                rank.wait(_PATIENCE / 2)
            except subprocess.TimeoutExpired:
                continue


if __name__ == "__main__":
    sys.exit(main())
