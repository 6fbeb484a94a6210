"""Keras callbacks."""

import os
import re
import shutil

import keras

from sok_keras import checkpoint


class DumpCheckpoint(keras.callbacks.Callback):
    """Writes a dump of the model while it trains, and goes on from the newest one when training starts.

    Args:
        path: A directory; each dump is a directory in it, `step-<count of updates>`.
        save_freq: `"epoch"`, or a number of batches.
        keep: How many dumps to keep, the newest.
        restore: Whether `on_train_begin` loads the newest dump that is there.
    """

    def __init__(self, path, *, save_freq="epoch", keep=1, restore=True):
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

    def dumps(self):
        """Paths of the dumps, oldest first."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))
        found = [os.path.join(self.path, f"step-{step}") for step in steps]
        # A directory without a manifest is a dump that never was finished.
        return [path for path in found if os.path.exists(os.path.join(path, "manifest.json"))]

    def on_train_begin(self, logs=None):
        dumps = self.dumps()
        if self.restore and dumps:
            checkpoint.load(dumps[-1], self.model)

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self.save_freq != "epoch" and self._batches % self.save_freq == 0:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        if self.save_freq == "epoch":
            self._save()

    def _save(self):
        step = checkpoint._step_of(self.model)
        checkpoint.dump(os.path.join(self.path, f"step-{step}"), self.model)
        for old in self.dumps()[: -self.keep]:
            shutil.rmtree(old)
