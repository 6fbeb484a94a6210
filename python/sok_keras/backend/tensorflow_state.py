"""Rows in TensorFlow's object-based checkpoints. A SavedModel has no rows: its graph calls the tables of its process."""

import io

import numpy as np
import tensorflow as tf

from sok_keras.backend.private_tensorflow import Trackable, restore_by


class TableState:
    """Base of the layers that saves rows in the framework's own files."""

    def _watch_state(self):
        own, rows = self._core.trigger, _rows_of(self)

        def restore(tensors):
            """Keeps the trigger's own value. Notes a trigger that comes without its rows."""
            eagerly(look_at, list(tensors.values()))

        def look_at(value):
            if value.numpy()[-1, -1] != rows.restored_mark:
                own.look_at(value.numpy(), may_be_old=True)

        restore_by(self.trigger, restore)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        return {**children, "rows": _rows_of(self)} if save_type == "checkpoint" else children


def _rows_of(layer):
    if "_rows" not in layer.__dict__:
        layer.__dict__["_rows"] = _Rows(layer)  # Keras' `__setattr__` would make it a part of SavedModels too
    return layer.__dict__["_rows"]


def eagerly(function, tensors, result=()):
    """Calls a function of eager tensors: at once, or in a graph when it runs."""
    return function(*tensors) if tf.executing_eagerly() else tf.py_function(function, tensors, result)


def packed(arrays):
    """Arrays by name as one string, as `numpy.savez` writes it."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked(string):
    with np.load(io.BytesIO(string), allow_pickle=False) as file:
        return dict(file)


def snapshot(rows, object_map):
    """Copies the present rows of an object with one string, for an asynchronous checkpoint."""
    if rows not in object_map:
        with tf.init_scope():
            object_map[rows] = _Snapshot()
    object_map[rows].rows.assign(rows._serialize_to_tensors()["rows"])


class _Rows(Trackable):
    """A layer's rows as an object of a checkpoint: one string, as `numpy.savez` writes it."""

    def __init__(self, layer):
        self._layer = layer
        # Mark of the trigger that was saved with the restored rows.
        self.restored_mark = None

    def _serialize_to_tensors(self):
        return {"rows": eagerly(self._write, [], tf.string)}

    def _restore_from_tensors(self, tensors):
        eagerly(self._read, [tensors["rows"]])

    def _copy_trackable_to_cpu(self, object_map):
        snapshot(self, object_map)

    def _write(self):
        return tf.constant(packed({"mark": self._layer._core.trigger.mark, **self._layer._rows_to_save()}))

    def _read(self, rows):
        arrays = unpacked(rows.numpy())
        mark = arrays.pop("mark")
        self._layer._load_rows(arrays, "checkpoint")
        self._layer._core.trigger.keep_rows()  # the trigger may have come first
        self.restored_mark = mark


class _Snapshot(Trackable):
    def __init__(self):
        self.rows = tf.Variable("", trainable=False)

    def _serialize_to_tensors(self):
        return {"rows": self.rows.read_value()}

    def _restore_from_tensors(self, tensors):
        self.rows.assign(tensors["rows"])
