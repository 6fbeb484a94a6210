"""Dumps that are written while training goes on."""

import concurrent.futures
import json
import threading
import warnings

from sok_keras._native import FrozenDump
from sok_keras.manifest import Manifest, manifest_of
from sok_keras.pending_dumps import note_dump


class DumpHandle:
    """A dump that is being written. `dump(..., wait=False)` returns it.

    The dump has the rows and variables as they were when `dump` was called, whatever is trained meanwhile. The interpreter does not end
    before the dump is written.

    Example:

    >>> import tempfile
    >>> handle = sok.dump(tempfile.mkdtemp() + "/dump", model, wait=False)
    >>> handle.result().tables[0].name == model.layers[1].name
    True
    """

    def __init__(self, path: str, frozen: FrozenDump) -> None:
        self._path = path
        self._frozen = frozen
        self._was_asked = False
        self._future: concurrent.futures.Future[Manifest] = concurrent.futures.Future()
        threading.Thread(target=_write, args=(path, frozen, self._future), name="sok-dump").start()
        note_dump(path, self._future)

    def result(self, timeout: float | None = None) -> Manifest:
        """Waits until the dump is written.

        Args:
            timeout: Number of seconds to wait. None: as long as it takes.

        Returns:
            The `Manifest`.

        Raises:
            TimeoutError: If it is not written in time. It can be asked for again.
            OSError: If it could not be written, for example because the disk is full. An old dump is unchanged then.
            SokError: As `dump`.
        """
        try:
            manifest = self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(f"the dump to {self._path} is not written within {timeout} s") from None
        finally:
            self._was_asked = self._future.done()
        return manifest

    def done(self) -> bool:
        """Returns whether the dump is written, or has failed."""
        return self._future.done()

    @property
    def progress(self) -> float:
        """Part of the rows that is written, from 0 to 1."""
        if self.done() and self._future.exception() is None:
            return 1.0
        written, rows = self._frozen.progress()
        return written / rows if rows else 0.0

    def __del__(self) -> None:
        future = getattr(self, "_future", None)
        if future is not None and future.done() and not self._was_asked and future.exception() is not None:
            warnings.warn(f"The dump to {self._path} has failed: {future.exception()}", stacklevel=2)


def _write(path, frozen, future):
    try:
        future.set_result(manifest_of(path, json.loads(frozen.write())))
    except BaseException as error:
        future.set_exception(error)
