"""A layer over one table of any 64-bit ids."""

import datetime
from typing import Any

import keras
import numpy as np

from sok_keras import ids, preprocessing
from sok_keras.keys import signed_key
from sok_keras.layers.base import TableLayer, axis_of, table_core_config
from sok_keras.policies import (
    Admission,
    Eviction,
    TimeToLive,
    as_python_int,
    get_admission,
    get_eviction,
    get_time_to_live,
)
from sok_keras.table import Table, as_keys
from sok_keras.table_config import TableConfig, check_choice
from sok_keras.table_optimizers import optimizer_config

# Arguments of `keras.layers.Embedding` that this layer does not have, and what to do instead.
_UNSUPPORTED_ARGUMENTS = {
    "input_dim": "A table takes any 64-bit id and grows. Leave it out",
    "input_length": "Leave it out, as in Keras 3",
    "embeddings_regularizer": "Rows are no Keras variables. Use `activity_regularizer`, or an optimizer with weight decay",
    "embeddings_constraint": "Rows are no Keras variables. Limit them after the layer, for example by "
    "`keras.layers.UnitNormalization`",
    "weights": "Give rows as `initial_value`, or set them by `layer.set_embedding_tables`",
    "lora_rank": "Rows are no Keras variables. `layer.trainable = False` freezes them",
}


def _check_arguments(output_dim: Any, second: Any, others: dict[str, Any]) -> None:
    """Raises a `ValueError` for a call as of `keras.layers.Embedding`: `input_dim` first, or an argument that this layer does not have."""
    if isinstance(second, int):
        raise ValueError(
            "`DynamicEmbedding` has no `input_dim`, since a table takes any 64-bit id and grows: use "
            f"`DynamicEmbedding({second})`. Received: DynamicEmbedding({output_dim!r}, {second!r})"
        )
    for argument, instead in _UNSUPPORTED_ARGUMENTS.items():
        if argument in others:
            raise ValueError(
                f"`DynamicEmbedding` has no `{argument}`. {instead}. Received: {argument}={others[argument]!r}"
            )


@keras.saving.register_keras_serializable(package="sok_keras")
class DynamicEmbedding(TableLayer):
    """Turns any 64-bit ids into rows of floats. Training makes a row when it first sees an id.

    Rows are not Keras variables. Compile the model with `OptimizerWrapper(optimizer)`, which trains them.

    Example:

    >>> import keras, numpy as np, sok_keras as sok
    >>> inputs = keras.Input((3,), dtype="int32")
    >>> outputs = keras.layers.Dense(1)(sok.DynamicEmbedding(8, combiner="mean")(inputs))
    >>> model = keras.Model(inputs, outputs)
    >>> model.compile(sok.OptimizerWrapper("adam"), "mse")
    >>> history = model.fit(np.array([[7, 7, 9], [5, 7, 11]], "int32"), np.zeros((2, 1)), verbose=0)
    >>> len(model.layers[1].get_table())
    4

    Args:
        output_dim: Number of floats in a row.
        embeddings_initializer: Keras initializer of new rows. A row's first value is a function of seed, key and column.
        initial_value: Rows `(n, output_dim)` of the keys from 0 to n - 1, which the table has from `build` on. An array, or what has a shape and
            gives parts of itself as arrays, such as `np.memmap`; it is read in parts, and not kept. All ranks give the same. None: no rows.
        combiner: None for one row for each id. `"mean"`, `"sum"` or `"sqrtn"` to combine the rows of the ids along the last axis. An
            empty bag gives zeros. Inputs with one axis are not combined.
        padding_key: An id that means "no id": it makes no row, is no member of a bag, and gives zeros where rows are not combined. The
            mask for the layers that follow is False for it, and for bags of it alone. None: every id is looked up.
        mask_zero: True for `padding_key=0`, as in `keras.layers.Embedding`.
        missing: What a lookup that does not insert returns for an id without a row: `"initial"` for its first value, or
            `"zeros"`.
        out_of_vocabulary_key: An id whose row such a lookup returns instead, for every id without a row. Feed this id in place of rare
            ids to train its row.
        seed: Seed of first values, an int. None: drawn as Keras draws the seeds of initializers.
        initial_capacity: Number of rows to allocate at once.
        max_capacity: Maximal number of rows. None: as many as fit into memory.
        check_mode: What happens to a batch whose new ids do not fit. `"raise"` raises `TableFullError` and changes nothing.
            `"warn"` and `"count"` insert the ids that fit.
        eviction: Which rows a table at `max_capacity` removes to make room: `"lru"`, `"lfu"`, or a policy of `sok_keras.policies`. None:
            it removes none.
        admission: Which new ids get a row in training: a policy of `sok_keras.policies`. None: all.
        time_to_live: After which time without training a row goes: a number of steps, a `datetime.timedelta`, or
            `sok_keras.policies.TimeToLive(...)`. None: it stays.
        optimizer: Keras optimizer, or its name, that updates the rows, with a learning rate, a schedule and states of its own, as in `TableConfig`. None:
            the model's optimizer.
        embedding_dtype: Type in which rows are stored: `"float32"`, or `"float16"` or `"bfloat16"` for half the memory. Optimizer states and
            all arithmetic are float32. A row is rounded to the nearest when it is stored.
        stochastic_rounding: Whether updates round rows of 16 bits by chance instead of to the nearest, so that steps which are smaller
            than the distance between two numbers are not lost. The chance is a function of seed, step, id and column.
        placement: Which ranks have the rows: `"distributed"`, `"localized:r"` or `"auto"`, as in `TableConfig`.
        storage: `"hbm"` for the memory of the GPU that the model runs on, `"host"` for the memory of the host, or `"auto"` for
            `"hbm"` where there is a GPU. If the model runs on a GPU, ids and rows of a table on the host are copied in each step.
        save_rows: Whether `.keras` files, weights files, PyTorch's state dicts and TensorFlow's checkpoints hold the rows. For large
            tables use `sok_keras.dump`.

    Call arguments:
        inputs: Ids.
        weights: Floats, one for each id. None: every id has weight 1.
        training: When ids without a row get one. True: at once; with an `admission` policy as for None. None: when the optimizer applies
            a gradient of this call. False: never.
        scores: Integers, one for each id, for `eviction=sok_keras.policies.Custom()`. None: scores of rows stay as they are.

    Input shape:
        Ids of any integer dtype and shape `(batch,)` to `(batch, ..., hotness)`:

        - dense tensors, or lists and columns of integers; on JAX without x64 `{"low": int32, "high": int32}` for 64-bit ids;
        - ragged ids `(batch, None)` as `{"values": ids of shape (n,), "row_splits": (batch + 1,)}`; weights are `(n,)` then;
        - on TensorFlow `RaggedTensor`, `SparseTensor`, and strings in any of these, whose keys `sok_keras.string_keys` gives;
        - on PyTorch nested tensors of two axes; weights are `(n,)` then.

        `weights` and `scores` have the shape of the ids; on TensorFlow they are ragged or sparse where the ids are, with values in the same places.
        An id of weight 0 gets no row and adds nothing. Weights may be negative. `preprocess` makes these forms of others.

    Output shape:
        `(..., output_dim)`, and with a combiner without the last axis of the ids. If an axis before `output_dim` is ragged, the output has
        the form of the ids: `RaggedTensor`, nested tensor or `{"values": (n, output_dim), "row_splits"}`. Sparse ids give a dense
        tensor; without a combiner it has zeros where there is no id.
    """

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        initial_value: Any = None,
        combiner: str | None = None,
        padding_key: int | None = None,
        mask_zero: bool = False,
        missing: str = "initial",
        out_of_vocabulary_key: int | None = None,
        seed: Any = None,
        initial_capacity: int = 0,
        max_capacity: int | None = None,
        check_mode: str = "raise",
        eviction: Eviction | str | None = None,
        admission: Admission | None = None,
        time_to_live: TimeToLive | datetime.timedelta | int | None = None,
        optimizer: Any = None,
        embedding_dtype: str = "float32",
        stochastic_rounding: bool = False,
        storage: str = "auto",
        placement: str = "auto",
        save_rows: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_arguments(output_dim, embeddings_initializer, kwargs)
        super().__init__(save_rows=save_rows, **kwargs)
        if not isinstance(output_dim, int | np.integer) or output_dim < 1:
            raise ValueError(f"`output_dim` must be a positive integer. Received: output_dim={output_dim!r}")
        if combiner is not None:
            check_choice("combiner", combiner)
        ids.check_padding_key(padding_key)
        padding_key = as_python_int(padding_key)
        if signed_key(padding_key) not in (None, 0) and mask_zero:
            raise ValueError(
                "`mask_zero` must be False with another `padding_key` than 0, since both name the id that is masked. Received: "
                f"mask_zero={mask_zero!r}, padding_key={padding_key!r}"
            )
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.combiner = combiner
        self.padding_key = padding_key
        self.mask_zero = mask_zero
        self._padding_key = 0 if mask_zero else padding_key
        self.supports_masking = self._padding_key is not None
        self.missing = missing
        self.check_mode = check_mode
        self.eviction = get_eviction(eviction)
        self.admission = get_admission(admission)
        self.time_to_live = get_time_to_live(time_to_live)
        self.embedding_dtype = embedding_dtype
        self.stochastic_rounding = stochastic_rounding
        self.storage = storage
        self.placement = placement
        table = TableConfig(
            self.name,
            None,
            output_dim,
            self.embeddings_initializer,
            missing=missing,
            out_of_vocabulary_key=out_of_vocabulary_key,
            seed=seed,
            initial_capacity=initial_capacity,
            max_capacity=max_capacity,
            check_mode=check_mode,
            eviction=self.eviction,
            admission=self.admission,
            time_to_live=self.time_to_live,
            optimizer=optimizer,
            embedding_dtype=embedding_dtype,
            stochastic_rounding=stochastic_rounding,
            storage=storage,
            placement=placement,
            initial_value=initial_value,
        )
        self.output_dim = table.embedding_dim
        self.out_of_vocabulary_key = table.out_of_vocabulary_key
        self.initial_capacity = table.initial_capacity
        self.max_capacity = table.max_capacity
        self.optimizer = table.optimizer
        self._make_core([table_core_config(table)], [table])

    @property
    def seed(self) -> int:
        """Seed of first values: as given or drawn, or that of the rows that were loaded."""
        return self._core.seeds()[0]

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None, scores: Any = None) -> Any:
        feature, inputs, tensors, weights = self._feature(inputs, weights, scores)
        (rows,) = self._lookup((feature,), [tensors], [weights], training)
        return ids.rows_like(inputs, rows, feature[3])

    def _feature(self, inputs: Any, weights: Any, scores: Any = None) -> tuple[tuple, Any, tuple, Any]:
        """Returns the feature of a plan, the ids in order, their tensors and those of their scores, and their weights."""
        reduces = self.combiner is not None
        inputs = preprocessing.ids_of(inputs, self._padding_key, self.name)
        inputs, weights, scores = (ids.in_order(value, self.name, reduces) for value in (inputs, weights, scores))
        axis = axis_of(inputs, reduces)
        tensors = ids.tensors_of(inputs, self.name, axis)
        weights = ids.weights_of(weights, inputs, self.name)
        scores = ids.scores_of(scores, inputs, self.name, self.eviction)
        if axis == "each" and self.combiner in ("mean", "sqrtn"):
            weights = None  # of one id, they cancel
        combiner = self.combiner or "sum"
        feature = (
            self.name,
            0,
            ids.has_words(inputs),
            axis,
            weights is not None,
            scores is not None,
            combiner,
            signed_key(self._padding_key),
        )
        return feature, inputs, tensors if scores is None else (*tensors, scores), weights

    def _prefetch(self, inputs: Any) -> None:
        feature, _, tensors, weights = self._feature(inputs, None)
        if weights is None:
            self._tell((feature,), [tensors])

    def preprocess(self, inputs: Any, weights: Any = None, *, ragged: bool = False) -> Any:
        """Converts ids on the host to what `call` takes on this backend.

        Strings become the keys that `sok_keras.string_keys` gives them. Ids that are missing (None, NaN, pandas' NA) become
        `padding_key`. On JAX without x64, 64-bit ids become `{"low": int32, "high": int32}`. Tensors are returned as they are.

        Rows of unequal length are padded: with `padding_key`, or if there is none with ids of weight 0. With `ragged=True` they become
        `{"values", "row_splits"}`, which batches of a generator or a `keras.utils.PyDataset` may be. JAX compiles a step for each number
        of values, so `values` are padded there to 4, 5, 6 or 7 times a power of two.

        Example:

        >>> layer = sok.DynamicEmbedding(4, combiner="mean", padding_key=-1)
        >>> rows = layer(layer.preprocess([[3, 5], [7, None], []]))
        >>> rows.shape[0]
        3

        Args:
            inputs: Ids or strings: an array, a list, a column or frame of pandas; lists of unequal length, a nested tensor of PyTorch; or
                a SciPy matrix, whose columns are ids and whose values are weights.
            weights: Floats of the same form, or None.
            ragged: Whether rows that are given as lists, as a nested tensor or as a SciPy matrix become ragged. Arrays of two axes do not.

        Returns:
            The ids, or `(ids, weights)` if there are weights: those that were given, a SciPy matrix' values, or those of padding.

        Raises:
            ValueError: If ids are missing and there is no `padding_key`, if there are values that are no ids, or if `weights` do not fit.
        """
        return preprocessing.preprocess(inputs, weights, self._padding_key, ragged, self.name)

    def get_table(self) -> Table:
        """Returns the layer's `Table`."""
        return self._core.tables[0]

    def get_embedding_tables(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns `{name: (keys, rows)}`: keys `(n,)` int64, rows `(n, dim)` float32."""
        contents = self.get_table().export()
        return {self.name: (contents.keys, contents.rows)}

    def set_embedding_tables(self, tables: dict) -> None:
        """Replaces all rows. Optimizer states are reset. If it raises, nothing has changed.

        Args:
            tables: `{name: (keys, rows)}`, as `get_embedding_tables` returns it.

        Raises:
            TypeError: If keys are not integers.
            ValueError: If the name or the shape of the rows is not the table's.
            TableFullError: If there are more keys than `max_capacity`, and `check_mode` is `"raise"`.
        """
        set_tables({self.name: self.get_table()}, tables)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        del mask
        reduces = self.combiner is not None
        inputs = ids.in_order(preprocessing.ids_of(inputs, self._padding_key, self.name), self.name, reduces)
        return ids.mask_of(inputs, self._padding_key, reduces)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return ids.rows_shape(input_shape, self.output_dim, self.combiner is not None)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None, scores: Any = None
    ) -> Any:
        reduces = self.combiner is not None
        inputs = preprocessing.ids_of(inputs, self._padding_key, self.name)
        ids.check_dtype(inputs, self.name)
        ids.check_scores(scores, self.name, self.eviction)
        shape = ids.rows_shape(ids.shape_of(inputs), self.output_dim, reduces)
        return ids.spec_like(inputs, shape, self.compute_dtype, reduces)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.saving.serialize_keras_object(self.embeddings_initializer),
            "combiner": self.combiner,
            "padding_key": self.padding_key,
            "mask_zero": self.mask_zero,
            "missing": self.missing,
            "out_of_vocabulary_key": self.out_of_vocabulary_key,
            "seed": self.seed,
            "initial_capacity": self.initial_capacity,
            "max_capacity": self.max_capacity,
            "check_mode": self.check_mode,
            "eviction": keras.saving.serialize_keras_object(self.eviction),
            "admission": keras.saving.serialize_keras_object(self.admission),
            "time_to_live": keras.saving.serialize_keras_object(self.time_to_live),
            "optimizer": optimizer_config(self.optimizer),
            "embedding_dtype": self.embedding_dtype,
            "stochastic_rounding": self.stochastic_rounding,
            "storage": self.storage,
            "placement": self.placement,
            "save_rows": self.save_rows,
        }


def set_tables(own: dict[str, Table], given: dict) -> None:
    """Replaces the rows of `own` by `given`. All is checked before anything changes.

    Raises:
        TypeError: If keys are no integers.
        ValueError: If names or shapes are not those of the tables.
        TableFullError: If there are more rows than `max_capacity`, and `check_mode` is `"raise"`.
    """
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ValueError(f"`tables` must name tables of this layer, which has {sorted(own)}. Received: {unknown}")
    contents = {name: _contents_for(name, own[name], value) for name, value in given.items()}
    for name, (keys, _) in contents.items():
        own[name]._check_replacement(keys)
    for name, (keys, rows) in contents.items():
        own[name]._core.trigger.keep_rows()
        own[name].clear()
        own[name].assign(keys, rows)


def _contents_for(name: str, table: Table, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys `(n,)` int64 and rows `(n, dim)` float32 of what `set_embedding_tables` is given for a table."""
    if table.vocabulary_size is not None:
        keys, rows = np.arange(table.vocabulary_size), np.asarray(value, "float32")
    elif isinstance(value, tuple | list) and len(value) == 2:
        keys, rows = as_keys(value[0]), np.asarray(value[1], "float32")
    else:
        raise ValueError(f"Table {name!r} is dynamic and takes `(keys, rows)`. Received: {type(value).__name__}")
    wanted = (len(keys), table.dim)
    if rows.shape != wanted:
        raise ValueError(f"Rows of table {name!r} must have the shape {wanted}. Received: shape {rows.shape}")
    return keys, rows
