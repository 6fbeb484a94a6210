"""Keras callbacks."""

import os
import re
import shutil
from typing import Any

import keras

from sok_keras import checkpoint
from sok_keras.backend.native_errors import DumpError


class DumpCheckpoint(keras.callbacks.Callback):
    """Writes a dump of the model while it trains, and goes on from the newest one when training starts.

    The newest is the one that was written last, also beside those of a run that went further.

    Args:
        path: A directory; each dump is a directory in it, `step-<count of updates>`.
        save_freq: `"epoch"`, or a number of batches.
        keep: How many dumps to keep, the newest.
        restore: Whether `on_train_begin` loads the newest dump that is there.

    Raises:
        ValueError: If `save_freq` or `keep` is none of these.
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
        """Paths of the dumps, in the order in which they were written."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))
        found = [os.path.join(self.path, f"step-{step}") for step in steps]
        # A directory without a manifest is a dump that never was finished.
        found = [path for path in found if os.path.exists(os.path.join(path, "manifest.json"))]
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
        path = os.path.join(self.path, f"step-{checkpoint._step_of(self.model)}")
        checkpoint.dump(path, self.model)
        self._written = [*(other for other in self._written if other != path), path]
        for old in self.dumps()[: -self.keep]:
            shutil.rmtree(old)

    def _when_written(self, path):
        """What sorts dumps: our own come last, whatever a clock says; the others by the manifest, whose time is copied with it."""
        if path in self._written:
            return self._written.index(path), "", 0
        try:
            created = checkpoint.read_manifest(path).created
        except DumpError:
            created = "unknown"  # sorts after all times: a damaged dump could be the newest, and loading it says so
        # `created` counts seconds.
        return -1, created, os.stat(os.path.join(path, "manifest.json")).st_mtime_ns
