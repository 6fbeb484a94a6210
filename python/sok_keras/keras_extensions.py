"""What Keras' own callbacks and summaries need to know of models with tables.

Keras calls `on_train_begin` of a callback before the first batch. For models with tables it is extended here: an `EarlyStopping` that
would restore weights without rows raises an error, and `BackupAndRestore` goes on at the next batch. `Model.summary` lists the tables.
A `LossScaleOptimizer` skips a step if any rank has a gradient that is not finite. Of ranks that save a model, rank 0 writes the file.
"""

import contextlib
import functools
import os
import tempfile
from typing import Any

import keras

from sok_keras import backend, distributed
from sok_keras.backend.private_keras import resume_fit, start_epoch, steps_of, wrap_saving
from sok_keras.checkpoint import layers_of
from sok_keras.optimizer import OptimizerWrapper


def extend_keras() -> None:
    """Extends callbacks and models of Keras. Their subclasses inherit it."""
    _extend(keras.callbacks.EarlyStopping, _refuse_weights_without_rows)
    _extend(keras.callbacks.BackupAndRestore, _go_on_at_next_batch)
    _extend_summary()
    _extend_loss_scale()
    wrap_saving(_by_rank_0)


def _by_rank_0(save: Any) -> Any:
    @functools.wraps(save)
    def save_together(model, filepath, *args, **kwargs):
        if distributed.world_size() == 1 or not _exchanges_rows(model):
            return save(model, filepath, *args, **kwargs)
        saved, error = None, None
        with contextlib.ExitStack() as stack:
            if distributed.rank() > 0:
                # The other ranks write to a temporary directory: their layers only take part in the exchange.
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                filepath = os.path.join(folder, os.path.basename(os.path.normpath(filepath)))
            try:
                saved = save(model, filepath, *args, **kwargs)
            except Exception as raised:
                error = raised
        distributed.agree(error)
        return saved

    return save_together


def _exchanges_rows(model: Any) -> bool:
    """Whether ranks send each other rows as they save a model."""
    return any(not table._is_whole for layer in layers_of(model) if layer.save_rows for table in layer._core.tables)


def _extend_loss_scale() -> None:
    original = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(original)
    def check_finite(self, grads):
        finite = original(self, grads)
        if distributed.world_size() == 1 or not isinstance(self.inner_optimizer, OptimizerWrapper):
            return finite
        # Ranks skip a step together: one that went on alone would wait for the others.
        overflow = keras.ops.reshape(1.0 - keras.ops.cast(finite, "float32"), (1,))
        overflows, _ = backend.sum_gradients(overflow, overflow)
        return keras.ops.equal(overflows[0], 0)

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite


def _extend_summary() -> None:
    original = keras.Model.summary

    @functools.wraps(original)
    def summary(self, line_length=None, positions=None, print_fn=None, *args, **kwargs):
        original(self, line_length, positions, print_fn, *args, **kwargs)
        tables = [(layer._core, table) for layer in layers_of(self) for table in layer._core.tables]
        if tables:
            (print_fn or print)("\n".join(_lines_of(tables)))

    keras.Model.summary = summary


def _lines_of(tables: list) -> list[str]:
    """Lines of a summary: the rows, dims and bytes of tables, pairs of a core and a table."""
    lines, total = [" Tables, whose rows are not among the parameters above:"], 0
    for core, table in tables:
        stats = table.stats(local=True)
        size = f"{stats.size:,}" if table.vocabulary_size is None else f"{stats.size:,} of {table.vocabulary_size:,}"
        where = "host" if core.gpu is None else f"GPU {core.gpu}"
        lines.append(
            f"  {table.name}: {size} rows x {table.dim}, {_bytes(stats.bytes)} with optimizer states ({where})"
        )
        total += stats.bytes
    return [*lines, f" Total of tables: {_bytes(total)}"]


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TB"


def _extend(callback: Any, also: Any) -> None:
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
    if distributed.world_size() > 1:
        raise ValueError(
            "`keras.callbacks.BackupAndRestore` must be used by one process alone, since each rank would write and remove the same files. "
            f"Use `sok_keras.callbacks.DumpCheckpoint`. Received: {distributed.world_size()} ranks"
        )
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
