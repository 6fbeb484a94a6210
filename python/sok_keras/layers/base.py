"""What both layers are: tables in the core, a trigger that makes gradients come, rows in weights files."""

import inspect
import os
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from sok_keras import backend, ids, rows_file
from sok_keras.backend.insertion import Insertion
from sok_keras.core import Core
from sok_keras.export_guard import check_format
from sok_keras.initializers import core_initializer, core_seed, mixed_seed
from sok_keras.table_config import TableConfig

_ROWS = "rows.npz"

_SIZES = {
    "embedding_dim": "a positive integer",
    "vocabulary_size": "a positive integer or None",
    "initial_capacity": "an integer of at least 0",
    "max_capacity": "a positive integer or None",
}


def table_core_config(config: TableConfig, layer: str | None = None) -> dict[str, Any]:
    """A `TableConfig` as the core takes it. Of a table among several of a layer, the name is mixed into the seed."""
    for argument, what in _SIZES.items():
        value = getattr(config, argument)
        is_size = isinstance(value, int) and value >= ("positive" in what)
        if not is_size and not (value is None and "None" in what):
            raise ValueError(f"`{argument}` must be {what}. Received: {argument}={value!r}")
    return {
        "name": f"{layer}/{config.name}" if layer else config.name,
        "dim": config.embedding_dim,
        "vocabulary_size": config.vocabulary_size,
        "initializer": core_initializer(config.initializer, config.embedding_dim, config.vocabulary_size),
        "seed": core_seed(config.seed, config.initializer, config.name if layer else ""),
        "missing": config.missing,
        "out_of_vocabulary": config.out_of_vocabulary,
        "initial_capacity": config.initial_capacity,
        "max_capacity": config.max_capacity,
        "check_mode": config.check_mode,
    }


def table_seed(config: TableConfig, core_seed: int) -> int:
    """The `seed` by which a `TableConfig` gives the core this seed, for a table among several: its own if it does."""
    seed = mixed_seed(core_seed, config.name)
    given = config.seed
    return given if isinstance(given, int) and given % 2**64 == seed else seed


def check_one_device() -> None:
    """Raises a `DeviceError` where Keras would run one step on several devices: each would push all gradients."""
    count = 1
    distribution = keras.distribution.distribution()
    if distribution is not None:
        count = int(np.prod(distribution.device_mesh.shape))
    elif backend.name == "tensorflow":
        import tensorflow as tf

        count = tf.distribute.get_strategy().num_replicas_in_sync
    if count > 1:
        raise backend.native.DeviceError(
            f"One process uses one device. Received: a distribution over {count} devices. Start a process a device, for "
            f"example `torchrun --nproc-per-node {count} train.py`, without `keras.distribution` or a `tf.distribute` strategy"
        )


class TableLayer(backend.TableState, keras.layers.Layer):
    """Base of the layers; makes the trigger and saves the tables.

    The tables lie outside the framework. A lookup depends on the trigger, a small trainable variable, so that every framework
    asks for its gradient; that gradient names the push which brought the rows' gradients, and `OptimizerWrapper` applies it.
    """

    built: bool  # Keras' own

    def __init__(self, *, save_rows: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not keras.backend.is_float_dtype(self.compute_dtype):
            raise ValueError(
                f"`dtype` must be of floats, in which rows come back. Received: dtype={self.compute_dtype!r}"
            )
        self.save_rows = save_rows
        # Keras would turn int64 ids into int32 under JAX before anyone could say so.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.autocast = False
        # A TensorFlow op of the C API has no XLA kernel; a tf.function is fine.
        self.supports_jit = backend.name != "tensorflow"

    def _make_core(self, configs: list[dict[str, Any]], tables: list[TableConfig]) -> None:
        storages = {table.storage for table in tables} - {"auto"} or {"auto"}
        if len(storages) > 1:
            raise ValueError(
                "The tables of a layer must have one `storage`, since one call looks them all up. Received: "
                + ", ".join(f"{table.name}={table.storage!r}" for table in tables)
            )
        self._core = Core(configs, storages.pop())

    def build(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # tables have no input shape
        if self.built:
            return
        check_one_device()
        first = self._core.first_trigger
        self.trigger = self.add_weight(
            shape=(64, 2), initializer=first, dtype="float32", autocast=False, trainable=True, name="trigger"
        )
        self.trigger.sok_core = self._core
        self._core.watch(self.trigger)
        self._watch_state()
        self.built = True

    def _lookup(self, features: tuple, inputs: list, weights: list, training: bool | None) -> list:
        """Rows of each feature in the compute dtype.

        `features`: a plan's features. `inputs`: tensors of each. `weights`: a tensor or None of each.
        """
        learns = self.trainable and self.trigger.trainable
        insertion = _insertion(training, learns)
        if backend.is_tracing(inputs[0][0]):
            check_format(self.name)
        self._core.check_weights()
        plan = self._core.plan(features, check_finite=self.compute_dtype == "float16")
        rows = backend.lookup(plan, self.trigger.value, learns, inputs, weights, insertion)
        if not backend.is_compiling():
            self._core.warn_of_refused()
        return [ops.cast(row, self.compute_dtype) for row in rows]

    # ---- saving

    def save_own_variables(self, store: Any) -> None:
        self._core.synchronize()
        # Read by nobody, but Keras passes over layers without an entry.
        store["trigger"] = ops.convert_to_numpy(self.trigger.value)
        if self.save_rows:
            rows_file.save(self._core, store)

    def load_own_variables(self, store: Any) -> None:
        if self._has_rows(store, "file"):
            rows_file.load(self._core, store)

    def _has_rows(self, store: Any, where: str) -> bool:
        has_rows = rows_file.has_rows(store)
        if not has_rows and self.save_rows:
            raise ValueError(f"The {where} has no rows for layer {self.name!r}: it was saved with `save_rows=False`")
        return has_rows

    def _rows_to_save(self) -> dict[str, Any]:
        """Arrays by name, for a framework's own files; none with `save_rows=False`."""
        self._core.synchronize()
        rows: dict[str, Any] = {}
        if self.save_rows:
            rows_file.save(self._core, rows)
        return rows

    def _load_rows(self, rows: dict[str, Any], where: str) -> None:
        """Replaces the rows by what `_rows_to_save` gave. `where`: what it was in."""
        if self._has_rows(rows, where):
            rows_file.load(self._core, rows)
        else:
            warnings.warn(
                f"The {where} has no rows for layer {self.name!r}, which has `save_rows=False`: they stay as they are. Use "
                "`sok_keras.load` for them.",
                stacklevel=2,
            )

    def save_assets(self, dir_path: str) -> None:
        """For `keras.callbacks.OrbaxCheckpoint`, which saves variables and these files alone."""
        self._core.synchronize()
        if self.save_rows and not _has_weights_file(inspect.currentframe()):
            rows: dict[str, Any] = {}
            rows_file.save(self._core, rows)
            np.savez(os.path.join(dir_path, _ROWS), **rows)

    def load_assets(self, dir_path: str) -> None:
        path = dir_path and os.path.join(dir_path, _ROWS)
        if path and os.path.exists(path):
            with np.load(path, allow_pickle=False) as rows:
                rows_file.load(self._core, dict(rows))

    def __deepcopy__(self, memo: dict) -> "TableLayer":
        copy = type(self).from_config(self.get_config())
        memo[id(self)] = copy
        if self.built:
            copy.build()
        copy._core.copy_from(self._core)
        return copy

    def __reduce__(self) -> tuple:
        state: dict[str, np.ndarray] = {}
        rows_file.save(self._core, state)
        return _rebuild, (type(self), self.get_config(), self.built, state)


def _insertion(training: bool | None, learns: bool) -> Insertion:
    # In a symbolic scope PyTorch runs the layer for real, on made-up ids.
    if not learns or keras.src.backend.common.symbolic_scope.in_symbolic_scope():
        return Insertion.NEVER
    if training is None:
        return Insertion.AT_COMMIT
    return Insertion.AT_LOOKUP if training else Insertion.NEVER


def _has_weights_file(frame: Any) -> bool:
    """Whether Keras, which asks for a layer's files in this frame, has asked for its variables too, as for a `.keras` file: then a
    local of the caller says so. Should it bear another name one day, rows are written twice, never left out."""
    return bool(frame.f_back.f_locals.get("weights_store"))


def _rebuild(
    cls: type["TableLayer"], config: dict[str, Any], is_built: bool, state: dict[str, np.ndarray]
) -> "TableLayer":
    layer = cls.from_config(config)
    if is_built:
        layer.build()
    rows_file.load(layer._core, state)
    return layer


def axis_of(value: Any, reduces: bool) -> str:
    """Which ids are combined: those along the last axis of ids with at least two axes, `"ragged"` or else `"last"`; or `"each"`
    stays by itself."""
    if not reduces or len(ids.shape_of(value)) < 2:
        return "each"
    form = ids.kind(value)
    # Below its ragged axes a ragged tensor may have dense ones.
    is_ragged = form == "sparse" or (form == "ragged" and len(value.flat_values.shape) == 1)
    return "ragged" if is_ragged else "last"
