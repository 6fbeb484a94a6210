"""Base of both layers: tables in the core, the trigger, rows in weights files."""

import inspect
import os
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from sok_keras import backend, distributed, ids, ragged, rows_file, table_optimizers
from sok_keras.backend.insertion import Insertion
from sok_keras.backend.private_keras import in_symbolic_scope
from sok_keras.core import Core
from sok_keras.core_initializers import core_initializer, core_seed, mixed_seed
from sok_keras.export_guard import check_format
from sok_keras.policies import (
    core_admission,
    core_eviction,
    core_time_to_live,
    get_admission,
    get_eviction,
    get_time_to_live,
)
from sok_keras.table import Table
from sok_keras.table_config import TableConfig

_ROWS = "rows.npz"
# Rows of an `initial_value` that are read at once.
_ROWS_AT_ONCE = 65_536

_SIZES = {
    "embedding_dim": "a positive integer",
    "vocabulary_size": "None or a positive integer of at most 64 bits",
    "initial_capacity": "an integer from 0 on of at most 64 bits",
    "max_capacity": "None or a positive integer of at most 64 bits",
}


def table_core_config(config: TableConfig, layer: str | None = None) -> dict[str, Any]:
    """Converts a `TableConfig` for the core. If the layer may have several tables, the name is mixed into the seed."""
    for argument, what in _SIZES.items():
        value = getattr(config, argument)
        is_size = isinstance(value, int) and not isinstance(value, bool) and ("positive" in what) <= value < 2**64
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
        "out_of_vocabulary_key": _missing_key(config),
        "initial_capacity": config.initial_capacity,
        "max_capacity": config.max_capacity,
        "check_mode": config.check_mode,
        "eviction": core_eviction(get_eviction(config.eviction)),
        "admission": core_admission(get_admission(config.admission)),
        "time_to_live": core_time_to_live(get_time_to_live(config.time_to_live)),
        "row_type": config.embedding_dtype,
        "stochastic_rounding": config.stochastic_rounding,
        "trainable": bool(config.trainable),
        "placement": distributed.core_placement(config),
    }


def _assign_first(table: Table, rows: Any) -> None:
    """Assigns `rows` to the keys from 0 on. All ranks call it."""
    rank, world_size = distributed.rank(), distributed.world_size()
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        some = ops.convert_to_numpy(rows[start : start + _ROWS_AT_ONCE])
        # Each rank hands a part of them to their owners.
        keys = np.arange(start, start + len(some))[rank::world_size]
        table.assign(keys, some[rank::world_size])


def _missing_key(config: TableConfig) -> int | None:
    """The key, as uint64, whose row keys without one have in the core. The ids of a static table are replaced before."""
    key = config.out_of_vocabulary_key
    return None if key is None or config.vocabulary_size is not None else key % 2**64


def table_seed(config: TableConfig, core_seed: int) -> int:
    """Returns the `seed` for which `table_core_config` gives `core_seed`, in a layer that may have several tables."""
    seed = mixed_seed(core_seed, config.name)
    given = config.seed
    return given if isinstance(given, int) and given % 2**64 == seed else seed


def check_one_device() -> None:
    """Raises a `DeviceError` if Keras would run a step on several devices, each of which would push all gradients."""
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
    """Base of both layers. Makes the trigger and saves the tables.

    The tables are outside of the framework. A lookup depends on the trigger, a small trainable variable, so every framework asks for
    the trigger's gradient. That gradient is the ticket of a push, and `OptimizerWrapper` applies the push.
    """

    built: bool  # set by Keras

    def __init__(self, *, save_rows: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not keras.backend.is_float_dtype(self.compute_dtype):
            raise ValueError(
                f"`dtype` must be a float dtype, because rows are floats. Received: dtype={self.compute_dtype!r}"
            )
        self.save_rows = save_rows
        # Under JAX, Keras would convert int64 ids to int32 before `call` could raise an error.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.autocast = False
        # Ops of TensorFlow's C API have no XLA kernels. They run in a `tf.function` without XLA.
        self.supports_jit = backend.name != "tensorflow"

    def _make_core(self, configs: list[dict[str, Any]], tables: list[TableConfig]) -> None:
        storages = {table.storage for table in tables} - {"auto"} or {"auto"}
        if len(storages) > 1:
            raise ValueError(
                "The tables of a layer must have one `storage`, since one call looks them all up. Received: "
                + ", ".join(f"{table.name}={table.storage!r}" for table in tables)
            )
        optimizers = table_optimizers.distinct(table.optimizer for table in tables)
        for config, table in zip(configs, tables, strict=True):
            # 0 is the model's.
            config["optimizer"] = 1 + optimizers.index(table.optimizer) if table.optimizer is not None else 0
        self._core = Core(configs, storages.pop(), optimizers)
        self._core.frozen = [table.name for table in tables if not table.trainable]
        self._initial_values = [table.initial_value for table in tables]

    def build(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # tables have no input shape
        if self.built:
            return
        check_one_device()
        first = self._core.trigger.first_value
        self.trigger = self.add_weight(
            shape=(64, 2), initializer=first, dtype="float32", autocast=False, trainable=True, name="trigger"
        )
        self.trigger.sok_core = self._core
        self._core.trigger.watch(self.trigger)
        self._watch_state()
        self.built = True
        for table, value in zip(self._core.tables, self._initial_values, strict=True):
            # Rows that were loaded or set before stay.
            if value is not None and len(table) == 0:
                _assign_first(table, value)
        self._initial_values = [None] * len(self._initial_values)

    def _lookup(
        self, features: tuple, inputs: list, weights: list, training: bool | None, frozen: bool = False
    ) -> list:
        """Looks up the rows of each feature, in the compute dtype.

        Args:
            features: The features of a plan.
            inputs: A tuple of tensors for each feature.
            weights: A tensor or None for each feature.
            training: As in `call`.
            frozen: Whether the tables of these features stay as they are.
        """
        learns = self.trainable and self.trigger.trainable and not frozen
        insertion = _insertion(training, learns)
        is_tracing = backend.is_tracing(inputs[0][0])
        if is_tracing:
            check_format(self.name)
        self._core.trigger.check()
        plan = self._plan(features)
        if is_tracing and not backend.is_compiling():
            self._core.note_traced_call(plan, inputs)
        rows = backend.lookup(plan, self.trigger.value, learns, inputs, weights, insertion)
        if not backend.is_compiling():
            self._core.warn_of_refused()
        return [ops.cast(row, self.compute_dtype) for row in rows]

    def _plan(self, features: tuple) -> Any:
        """Returns the plan of a call. The core writes rows in the compute dtype, so that no cast is needed, if it has numbers of it."""
        is_narrow = self.compute_dtype in ("bfloat16", "float16")
        return self._core.plan(features, self.compute_dtype if is_narrow else "float32")

    def _tell(self, features: tuple, tensors: list) -> None:
        """Tells the core the ids of a later call with `training=True`. The arguments are those of `_lookup`, without weights."""
        if isinstance(tensors[0][0], keras.KerasTensor) or backend.is_tracing(tensors[0][0]):
            raise ValueError("`prefetch` must be called outside of functions that are traced or compiled")
        plan = self._plan(features)
        if plan.gpu is not None and distributed.world_size() > 1:
            backend.prefetch(plan, tensors)

    # ---- saving

    def save_own_variables(self, store: Any) -> None:
        self._core.synchronize()
        # Nothing reads it, but Keras skips layers that save nothing.
        store["trigger"] = ops.convert_to_numpy(self.trigger.value)
        if self.save_rows:
            rows_file.save(self._core, store, on_all_ranks=False)

    def load_own_variables(self, store: Any) -> None:
        if self._has_rows(store, "file"):
            rows_file.load(self._core, store)

    def _has_rows(self, store: Any, where: str) -> bool:
        has_rows = rows_file.has_rows(store)
        if not has_rows and self.save_rows:
            raise ValueError(f"The {where} has no rows for layer {self.name!r}: it was saved with `save_rows=False`")
        return has_rows

    def _rows_to_save(self) -> dict[str, Any]:
        """Returns arrays by name, for files of the framework. Empty with `save_rows=False`."""
        self._core.synchronize()
        rows: dict[str, Any] = {}
        if self.save_rows:
            rows_file.save(self._core, rows)
        return rows

    def _load_rows(self, rows: dict[str, Any], where: str) -> None:
        """Replaces the rows by what `_rows_to_save` returned. `where`: the kind of file, for messages."""
        if self._has_rows(rows, where):
            rows_file.load(self._core, rows)
        else:
            warnings.warn(
                f"The {where} has no rows for layer {self.name!r}, which has `save_rows=False`: they stay as they are. Use "
                "`sok_keras.load` for them.",
                stacklevel=2,
            )

    def save_assets(self, dir_path: str) -> None:
        """Saves rows for `keras.callbacks.OrbaxCheckpoint`, which saves only variables and assets."""
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
        copy._initial_values = list(self._initial_values)
        memo[id(self)] = copy
        if self.built:
            copy.build()
        copy._core.copy_from(self._core)
        return copy

    def __reduce__(self) -> tuple:
        state: dict[str, np.ndarray] = {}
        rows_file.save(self._core, state)
        return _rebuild, (type(self), self.get_config(), self.built, state, list(self._initial_values))


def _insertion(training: bool | None, learns: bool) -> Insertion:
    # In a symbolic scope, Keras runs the layer on PyTorch with placeholder ids.
    if not learns or in_symbolic_scope():
        return Insertion.NEVER
    if training is None:
        return Insertion.AT_COMMIT
    return Insertion.AT_LOOKUP if training else Insertion.NEVER


def _has_weights_file(frame: Any) -> bool:
    """Whether Keras saves the layer's variables too, as in a `.keras` file.

    A local variable of Keras' function, whose frame this is, says so. If Keras renames it, rows are written twice.
    """
    return bool(frame.f_back.f_locals.get("weights_store"))


def _rebuild(
    cls: type["TableLayer"], config: dict[str, Any], is_built: bool, state: dict[str, np.ndarray], initial_values: list
) -> "TableLayer":
    layer = cls.from_config(config)
    layer._initial_values = initial_values
    if is_built:
        layer.build()
    rows_file.load(layer._core, state)
    return layer


def axis_of(value: Any, reduces: bool) -> str:
    """Says which ids are combined.

    Returns:
        `"ragged"` or `"last"`: those along the last axis, which is ragged or dense. `"each"`: none.
    """
    if not reduces or len(ids.shape_of(value)) < 2:
        return "each"
    if isinstance(value, ragged.Ragged):
        return "ragged"
    form = ids.kind(value)
    # Below its ragged axes a ragged tensor may have dense ones.
    is_ragged = form == "sparse" or (form == "ragged" and len(value.flat_values.shape) == 1)
    return "ragged" if is_ragged else "last"
