"""What Keras' own callbacks need to know of models with tables.

Keras calls `on_train_begin` of a callback before the first batch. For models with tables it is extended here: an `EarlyStopping` that
would restore weights without rows raises an error, and `BackupAndRestore` goes on at the next batch.
"""

import functools
from typing import Any

import keras

from sok_keras.backend.private_keras import resume_fit, start_epoch, steps_of
from sok_keras.checkpoint import layers_of


def extend_callbacks() -> None:
    """Extends the callbacks of Keras. Their subclasses inherit it."""
    _extend(keras.callbacks.EarlyStopping, _refuse_weights_without_rows)
    _extend(keras.callbacks.BackupAndRestore, _go_on_at_next_batch)


def _extend(callback: type, also: Any) -> None:
    original = callback.on_train_begin

    @functools.wraps(original)
    def on_train_begin(self, logs=None):
        original(self, logs)
        if self.model is not None and layers_of(self.model):
            also(self)

    callback.on_train_begin = on_train_begin


def _refuse_weights_without_rows(callback: Any) -> None:
    if callback.restore_best_weights:
        raise ValueError(
            "`restore_best_weights` must be False in `keras.callbacks.EarlyStopping` for a model with tables, since it restores no rows. "
            "Use `sok_keras.callbacks.EarlyStopping(restore_best_weights=True)`. Received: restore_best_weights=True"
        )


def _go_on_at_next_batch(callback: Any) -> None:
    """Keras goes on at the start of the epoch, whose first batches would be trained twice."""
    model, steps = callback.model, callback.params.get("steps")
    epoch = start_epoch(model)
    if model.optimizer is None or not (steps or epoch == 0):
        return
    done = _num_batches(model.optimizer) - epoch * (steps or 0)
    if done == steps:
        resume_fit(model, epoch + 1, 0)
    elif done > 0 and (steps is None or done < steps):
        resume_fit(model, epoch, done)


def _num_batches(optimizer: Any) -> int:
    """Number of batches that an optimizer was called for."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return int(keras.ops.convert_to_numpy(steps_of(optimizer)))
