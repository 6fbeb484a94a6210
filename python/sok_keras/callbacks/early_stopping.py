"""Early stopping that restores rows."""

import os
import tempfile
from typing import Any

import keras

from sok_keras import checkpoint, distributed


class EarlyStopping(keras.callbacks.EarlyStopping):
    """`keras.callbacks.EarlyStopping` for models with tables: `restore_best_weights` restores rows too.

    Keras' own callback keeps a copy of the weights, which rows are not part of. It raises an error at the start of training if a model
    has tables and `restore_best_weights` is True. This one writes a dump at each best epoch, and loads it when training ends. The
    optimizer's states are then those of that epoch as well.

    Example:

    >>> callback = sok.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)

    Args:
        monitor: Name of a metric in Keras' logs.
        restore_best_weights: Whether the model is restored from the best epoch when training ends.
        path: Directory of the dump of the best epoch. None: a temporary one, which is removed when training ends. Ranks on several hosts
            need one that all reach.
        **kwargs: As of `keras.callbacks.EarlyStopping`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        restore_best_weights: bool = False,
        path: checkpoint.Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(monitor, **kwargs)
        self.path = path
        self._restores = restore_best_weights
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._dump: str | None = None
        self.best_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._dump = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        has_metric = self.monitor in (logs or {})
        # Without an improvement the first epoch is the best until now.
        if self._restores and has_metric and (self._dump is None or self.best_epoch == epoch):
            path = self._dump or self._new_path()
            checkpoint.dump(path, self.model)
            self._dump = path
            self.best_epoch = epoch

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if self._dump is not None:
            checkpoint.load(self._dump, self.model)
        distributed.barrier()  # the others have read it
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _new_path(self):
        if self.path is not None:
            return os.fspath(self.path)
        if distributed.rank() == 0:
            self._temporary = tempfile.TemporaryDirectory(prefix="sok_keras-")
        return distributed.of_rank_0(self._temporary and self._temporary.name)
