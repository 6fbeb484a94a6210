"""Where in a `fit` dumps were written."""

import json
import os
import tempfile

_FILE = "sok-progress.json"
# Where training goes on; the number of batches that were trained, and of dumps since the last whole one.
_COUNTS = ("epoch", "batches", "trained", "since_base")


class Progress:
    """A file beside dumps: the epoch, the batch and the best metric of each.

    Args:
        directory: The directory of the dumps.
    """

    def __init__(self, directory):
        self._directory = directory
        self._path = os.path.join(directory, _FILE)

    def of(self, dump):
        """Returns the entry of a dump, by its name: a dict with `best` and the counts. None if there is none."""
        entry = self._read().get(dump)
        is_whole = isinstance(entry, dict) and set(entry) == {*_COUNTS, "best"}
        if not is_whole or not all(isinstance(entry[key], int) and entry[key] >= 0 for key in _COUNTS):
            return None
        return entry if entry["best"] is None or isinstance(entry["best"], int | float) else None

    def note(self, dump, entry):
        """Adds the entry of a dump, or of an increment. Entries of dumps that no longer exist are dropped, but for the newest one."""
        before = self._read()
        newest = [name for name in before if name != dump][-1:]
        entries = {
            name: old
            for name, old in before.items()
            if name in newest or os.path.isdir(os.path.join(self._directory, name))
        }
        entries.pop(dump, None)
        os.makedirs(self._directory, exist_ok=True)
        # A rename leaves the old file or the new one.
        handle, path = tempfile.mkstemp(prefix=f".{_FILE}-", dir=self._directory)
        with os.fdopen(handle, "w") as file:
            json.dump({**entries, dump: entry}, file)
        os.replace(path, self._path)

    def clear(self):
        """Removes the file. A link of its name is left alone."""
        if self._is_there():
            os.remove(self._path)

    def _is_there(self):
        return os.path.isfile(self._path) and not os.path.islink(self._path)

    def _read(self):
        """The entries by dump. Empty for a file that is missing, damaged, or not a plain file."""
        if not self._is_there():
            return {}
        try:
            with open(self._path) as file:
                entries = json.load(file)
        except (OSError, ValueError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}
