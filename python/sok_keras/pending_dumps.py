"""The dumps that this process is writing while it goes on."""

import concurrent.futures
import os
from typing import Any

# By the real path of their directories.
_writing: dict[str, concurrent.futures.Future[Any]] = {}
# The threads that write stay in the parent.
os.register_at_fork(after_in_child=_writing.clear)


def note_dump(path: str, future: concurrent.futures.Future[Any]) -> None:
    """Notes that a dump is being written to a directory until a future is done."""
    directory = os.path.realpath(path)
    _writing[directory] = future
    future.add_done_callback(lambda done: _forget(directory, done))


def wait_for_dumps(path: str, below: bool = False) -> None:
    """Waits until no dump is being written to a directory, whether or not it succeeds. `below`: or to one in it."""
    directory = os.path.realpath(path)
    for written, future in list(_writing.items()):
        if written == directory or (below and os.path.dirname(written) == directory):
            concurrent.futures.wait([future])


def _forget(directory, future):
    if _writing.get(directory) is future:
        del _writing[directory]
