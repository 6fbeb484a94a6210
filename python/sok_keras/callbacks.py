"""Keras callbacks."""

import os
import re
import stat
from typing import Any

import keras

from sok_keras import checkpoint
from sok_keras.arrays import step_of
from sok_keras.errors import DumpError
from sok_keras.manifest import read_manifest

_MANIFEST = "manifest.json"
# Files that a dump writes, as docs/checkpoint_format.md names them.
_OWN_FILE = re.compile(r"manifest\.json|sok-[0-9a-f]{16}-([0-9]{5,20}\.safetensors|manifest\.json)")


class DumpCheckpoint(keras.callbacks.Callback):
    """Writes dumps of the model during training, and resumes from the newest one.

    The newest dump is the one that was written last, even if an earlier run has trained for more steps.

    Old dumps are removed if the callback wrote them, or if they are complete and their directory holds no other file. Files that are
    not part of a dump are never removed, and neither is a directory that holds one. A `step-<count>` that is a symbolic link is
    neither loaded, nor written to, nor removed.

    Example:

    >>> import tempfile
    >>> callback = sok.callbacks.DumpCheckpoint(tempfile.mkdtemp(), save_freq=1000, keep=2)

    Args:
        path: A directory. Each dump is a directory `step-<number of updates>` in it.
        save_freq: `"epoch"`, or a number of batches.
        keep: Number of dumps to keep.
        restore: Whether `on_train_begin` loads the newest dump.

    Raises:
        ValueError: If `save_freq` or `keep` has another value.
    """

    def __init__(
        self, path: checkpoint.Path, *, save_freq: str | int = "epoch", keep: int = 1, restore: bool = True
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(
                f'`save_freq` must be "epoch" or a positive number of batches. Received: save_freq={save_freq!r}'
            )
        if not (isinstance(keep, int) and keep > 0):
            raise ValueError(f"`keep` must be a positive integer. Received: keep={keep!r}")
        self.path = os.fspath(path)
        self.save_freq = save_freq
        self.keep = keep
        self.restore = restore
        self._batches = 0
        self._written: list[str] = []

    def dumps(self) -> list[str]:
        """Returns the paths of the dumps, oldest first."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-(0|[1-9][0-9]*)", name))
        found = [os.path.join(self.path, f"step-{step}") for step in steps]
        # A directory without a manifest is a dump that never was finished.
        found = [path for path in found if _is_directory(path) and os.path.lexists(os.path.join(path, _MANIFEST))]
        return sorted(found, key=self._when_written)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        dumps = self.dumps()
        if self.restore and dumps:
            checkpoint.load(dumps[-1], self.model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if isinstance(self.save_freq, int) and self._batches % self.save_freq == 0:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.save_freq == "epoch":
            self._save()

    def _save(self):
        path = os.path.join(self.path, f"step-{step_of(self.model)}")
        if os.path.islink(path):
            raise DumpError(f"{path}: a dump must lie in the callback's own directory: a symbolic link leads elsewhere")
        checkpoint.dump(path, self.model)
        self._written = [*(other for other in self._written if other != path), path]
        for old in self.dumps()[: -self.keep]:
            if old in self._written or _is_dump_alone(old):
                _remove_dump(old)

    def _when_written(self, path):
        """What sorts dumps: our own come last, whatever a clock says; the others by the manifest, whose time is copied with it."""
        if path in self._written:
            return self._written.index(path), "", 0
        try:
            created = read_manifest(path).created
        except DumpError:
            created = "unknown"  # sorts after all times: a damaged dump could be the newest, and loading it says so
        # `created` counts seconds.
        return -1, created, os.lstat(os.path.join(path, _MANIFEST)).st_mtime_ns


def _is_directory(path):
    """Whether it is one itself, no link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def _is_dump_alone(path):
    """Whether a directory holds a dump that can be read, and nothing else."""
    try:
        read_manifest(path)
    except (DumpError, OSError):
        return False
    with os.scandir(path) as entries:
        return all(_OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries)


def _remove_dump(path):
    """Removes a dump's own files, the manifest first: what is left is no dump. Then the directory, if nothing else is in it.

    All is done in the directory that was opened, whatever its name leads to by now.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = os.listdir(directory)
        for name in sorted(filter(_OWN_FILE.fullmatch, names), key=_MANIFEST.__ne__):
            if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
        is_empty = not os.listdir(directory)
    finally:
        os.close(directory)
    if is_empty:
        os.rmdir(path)


class TableStatistics(keras.callbacks.Callback):
    """Adds statistics of the model's tables to Keras' logs.

    Callbacks that come after it in the list see them: `CSVLogger`, `TensorBoard`; so does `History`. For each table these are
    `<name>/size`, `<name>/bytes`, `<name>/occupancy` (size over `max_capacity`, or over the capacity of the index), and
    `<name>/hits`, `<name>/inserted`, `<name>/refused`, which count since the last update.

    Example:

    >>> callback = sok.callbacks.TableStatistics(update_freq=100)

    Args:
        update_freq: `"epoch"`, or a number of batches. Updates within an epoch do not wait for training steps.

    Raises:
        ValueError: If `update_freq` has another value.
    """

    def __init__(self, update_freq: str | int = "epoch") -> None:
        super().__init__()
        if update_freq != "epoch" and not (isinstance(update_freq, int) and update_freq > 0):
            raise ValueError(
                f'`update_freq` must be "epoch" or a positive number of batches. Received: update_freq={update_freq!r}'
            )
        self.update_freq = update_freq
        self._batches = 0
        self._before: dict[str, dict[str, Any]] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if isinstance(self.update_freq, int) and self._batches % self.update_freq == 0 and logs is not None:
            logs.update(self._numbers("batch", wait=False))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._numbers("epoch", wait=True))

    def _numbers(self, when, wait):
        numbers, before = {}, self._before.setdefault(when, {})
        for table in checkpoint._tables_of(self.model):
            now = table.stats(wait=wait)
            numbers[f"{table.name}/size"] = now.size
            numbers[f"{table.name}/occupancy"] = now.size / (table._max_capacity or now.capacity)
            numbers[f"{table.name}/bytes"] = now.bytes
            last = before.get(table.name)
            for name in ("hits", "inserted", "refused"):
                numbers[f"{table.name}/{name}"] = getattr(now, name) - (getattr(last, name) if last else 0)
            before[table.name] = now
        return numbers
