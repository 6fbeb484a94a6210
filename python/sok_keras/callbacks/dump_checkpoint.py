"""Dumps during training, and training that goes on from them."""

import os
import re
import stat
import warnings
from typing import Any

import keras

from sok_keras import checkpoint, distributed
from sok_keras.arrays import step_of
from sok_keras.backend.private_keras import forget_epoch, resume_fit
from sok_keras.callbacks.best import Best
from sok_keras.callbacks.frequency import check_frequency
from sok_keras.callbacks.progress import Progress
from sok_keras.dump_handle import DumpHandle
from sok_keras.errors import DumpError, DumpMismatchError, UnknownChangesError
from sok_keras.flags import check_flags
from sok_keras.manifest import path_of, read_manifest
from sok_keras.pending_dumps import wait_for_dumps

_MANIFEST = "manifest.json"
# Files that a dump writes, as docs/checkpoint_format.md names them.
_OWN_FILE = re.compile(r"manifest\.json|sok-[0-9a-f]{16}-([0-9]{5,20}\.safetensors|manifest\.json)")


class DumpCheckpoint(keras.callbacks.Callback):
    """Writes dumps of the model during training, and resumes from the newest one.

    A `fit` that was interrupted goes on where the newest dump was written: with the next batch, if the data come in the same order
    again. `fit` then draws the batches before it and leaves them out. After a `fit` that has ended, the next one starts with epoch 0.

    The newest dump is the one that was written last, even if an earlier run has trained for more steps.

    Old dumps are removed if the callback wrote them, or if they are complete and their directory holds no other file. Files that are
    not part of a dump are never removed, and neither is a directory that holds one. A `step-<count>` that is a symbolic link is
    neither loaded, nor written to, nor removed. `sok-progress.json` beside the dumps says in which epoch they were written. It is removed
    when `fit` ends.

    Example:

    >>> import tempfile
    >>> callback = sok.callbacks.DumpCheckpoint(tempfile.mkdtemp(), save_freq=1000, keep=2)

    Args:
        path: A directory. Each dump is a directory `step-<number of updates>` in it.
        save_freq: `"epoch"`, or a number of batches.
        increments_every: Number of batches after which `dump_increment` adds to the newest dump, between the dumps of `save_freq`. The first
            one is whole. None: never.
        base_every: Every `base_every`-th dump of `save_freq` is whole; those between are increments. None: all are whole. Where
            `dump_increment` raises `UnknownChangesError`, as after `Table.clear`, a whole dump is written with a warning.
        keep: Number of dumps to keep.
        restore: Whether `on_train_begin` loads the newest dump and goes on from it.
        monitor: Name of a metric in Keras' logs that `save_best_only` compares, for example `"val_loss"`.
        mode: `"min"`, `"max"` or `"auto"`: which values of `monitor` are better. `"auto"` is decided as in
            `keras.callbacks.EarlyStopping`.
        save_best_only: Whether a dump is written only if `monitor` has improved since the last one.
        wait: Whether training waits until a dump is written. If not, it goes on while a copy of the tables is written, for which there
            must be memory. Before the next dump, and when `fit` ends, it waits for the one that is being written.

    Raises:
        TypeError: If `path` is no path.
        ValueError: If another argument has another value.
    """

    def __init__(
        self,
        path: checkpoint.Path,
        *,
        save_freq: str | int = "epoch",
        keep: int = 1,
        restore: bool = True,
        monitor: str | None = None,
        mode: str = "auto",
        save_best_only: bool = False,
        increments_every: int | None = None,
        base_every: int | None = None,
        wait: bool = True,
    ) -> None:
        super().__init__()
        check_frequency("save_freq", save_freq)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"`keep` must be a positive integer. Received: keep={keep!r}")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f'`mode` must be "auto", "min" or "max". Received: mode={mode!r}')
        if save_best_only != isinstance(monitor, str):
            raise ValueError(
                "`monitor` must be the name of a metric if `save_best_only` is True, and None otherwise. Received: "
                f"monitor={monitor!r}, save_best_only={save_best_only!r}"
            )
        for name, every in (("increments_every", increments_every), ("base_every", base_every)):
            if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
                raise ValueError(f"`{name}` must be None or a positive integer. Received: {name}={every!r}")
        if save_best_only and (increments_every or base_every):
            raise ValueError(
                "`increments_every` and `base_every` must be None if `save_best_only` is True, since the best dump is a whole one. Received: "
                f"increments_every={increments_every!r}, base_every={base_every!r}"
            )
        check_flags(restore=restore, save_best_only=save_best_only, wait=wait)
        self.path = path_of(path)
        self.save_freq = save_freq
        self.keep = keep
        self.restore = restore
        self.monitor = monitor
        self._best = Best(monitor, mode) if monitor is not None else None
        self._progress = Progress(self.path)
        self._epoch = 0
        self._batches = 0
        # Batches of the first epoch that were trained before the restart.
        self._done = 0
        self._written: list[str] = []
        self.increments_every = increments_every
        self.base_every = base_every
        # The newest dump, to which increments are added, and the number of dumps that `save_freq` has asked for since it was made.
        self._base: str | None = None
        self._since_base = 0
        self.wait = wait
        # The dump that is being written, and its path if it is whole.
        self._pending: tuple[DumpHandle, str | None] | None = None

    def dumps(self) -> list[str]:
        """Returns the paths of the dumps, oldest first."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-(0|[1-9][0-9]*)", name))
        found = [os.path.join(self.path, f"step-{step}") for step in steps]
        # A directory without a manifest is a dump that never was finished.
        found = [path for path in found if _is_directory(path) and os.path.lexists(os.path.join(path, _MANIFEST))]
        return sorted(found, key=self._when_written)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._finish()
        # Another callback may have started one before its `fit` was interrupted.
        wait_for_dumps(self.path, below=True)
        self._epoch, self._done = 0, 0
        if self._best is not None:
            self._best.begin(self.model)
        self._base = None
        dumps = self.dumps() if self.restore and distributed.rank() == 0 else []
        newest = distributed.of_rank_0(dumps[-1] if dumps else None)
        if newest is not None:
            step = checkpoint.load(newest, self.model).step
            # Without a progress file, every increment counts as one that `save_freq` asked for.
            self._base, self._since_base = newest, len(read_manifest(newest).increments)
            # A `fit` that was interrupted may have left more, and this one may add increments alone.
            self._remove_old()
            self._go_on(distributed.of_rank_0(self._progress.of(f"step-{step}") if distributed.rank() == 0 else None))

    def _go_on(self, entry):
        if entry is None:
            return
        self._epoch, self._done = entry["epoch"], entry["batches"]
        self._batches, self._since_base = entry["trained"], entry["since_base"]
        if self._best is not None:
            self._best.value = entry["best"]
        resume_fit(self.model, self._epoch, self._done)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        forget_epoch(self.model)  # `fit` has read it
        if epoch != self._epoch:
            self._epoch, self._done = epoch, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch < self._done:
            return  # it was trained before the restart
        if self._pending and self._pending[0].done():
            self._finish()
        self._batches += 1
        if isinstance(self.save_freq, int) and self._batches % self.save_freq == 0:
            self._save(logs, *self._after(batch))
        elif self.increments_every and self._batches % self.increments_every == 0:
            self._write(*self._after(batch), is_whole=False)

    def _after(self, batch: int) -> tuple[int, int]:
        """Returns epoch and batch with which training goes on after a batch of the epoch."""
        return (self._epoch + 1, 0) if batch + 1 == self.params.get("steps") else (self._epoch, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.save_freq == "epoch":
            self._save(logs, epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._finish()
        if distributed.rank() == 0:
            self._progress.clear()
        forget_epoch(self.model)

    def _save(self, logs, epoch, batches):
        """Writes a dump. `epoch`, `batches`: where training goes on after it."""
        # The metrics of ranks differ, but a dump is of all of them.
        if self._best is not None and not distributed.of_rank_0(bool(self._best.improves(logs or {}))):
            return
        self._since_base += 1
        self._write(epoch, batches, is_whole=self.base_every is None or self._since_base >= self.base_every)

    def _write(self, epoch, batches, is_whole):
        """Writes a whole dump, or adds an increment to the newest one where that is possible."""
        self._finish()
        path = os.path.join(self.path, f"step-{step_of(self.model)}")
        if os.path.islink(path):
            raise DumpError(f"{path}: a dump must lie in the callback's own directory: a symbolic link leads elsewhere")
        entry = {"epoch": epoch, "batches": batches, "trained": self._batches}
        entry["best"] = None if self._best is None else self._best.value
        self._note(path, {**entry, "since_base": 0 if is_whole else self._since_base})
        if not is_whole and self._add_increment():
            return
        if not is_whole:
            self._note(path, {**entry, "since_base": 0})
        self._write_whole(path)

    def _note(self, path, entry):
        """Notes where training goes on. It is called before a dump is written: whichever dump is the newest after a crash, its entry is there."""
        if distributed.rank() == 0:
            self._progress.note(os.path.basename(path), entry)

    def _add_increment(self):
        """Adds to the newest dump. Returns False if that is not possible."""
        if not distributed.of_rank_0(self._base is not None and os.path.exists(os.path.join(self._base, _MANIFEST))):
            return False
        try:
            if self.wait:
                checkpoint.dump_increment(self._base, self.model)
            else:
                self._pending = checkpoint.dump_increment(self._base, self.model, wait=False), None
        except (UnknownChangesError, DumpMismatchError) as error:
            warnings.warn(f"A whole dump is written instead of an increment: {error}", stacklevel=2)
            return False
        return True

    def _write_whole(self, path):
        if self.wait:
            checkpoint.dump(path, self.model)
            self._keep_newest(path)
        else:
            self._pending = checkpoint.dump(path, self.model, wait=False), path
        self._base, self._since_base = path, 0

    def _finish(self):
        """Waits for the dump that is being written."""
        if self._pending is None:
            return
        (handle, path), self._pending = self._pending, None
        try:
            handle.result()
        except BaseException:
            self._base = None
            raise
        if path is not None:
            self._keep_newest(path)

    def _keep_newest(self, path):
        """Removes old dumps, now that the one at `path` is written."""
        self._written = [*(other for other in self._written if other != path), path]
        self._remove_old()

    def _remove_old(self):
        for old in self.dumps()[: -self.keep] if distributed.rank() == 0 else ():
            if old in self._written or _is_dump_alone(old):
                _remove_dump(old)

    def _when_written(self, path):
        """What sorts dumps: our own come last, whatever a clock says; the others by the manifest, whose time is copied with it."""
        if self._pending is not None and path == self._pending[1]:
            return len(self._written), "", 0
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
