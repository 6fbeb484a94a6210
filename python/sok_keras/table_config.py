"""Configuration of a table."""

import dataclasses
import datetime
from typing import Any

import keras
import numpy as np

from sok_keras.flags import check_flags
from sok_keras.policies import (
    Admission,
    Eviction,
    TimeToLive,
    as_python_int,
    check_eviction,
    check_is_dynamic,
    get_admission,
    get_eviction,
    get_time_to_live,
)
from sok_keras.table_optimizers import get_optimizer, optimizer_config

_INTEGERS = (
    "vocabulary_size",
    "embedding_dim",
    "out_of_vocabulary_key",
    "seed",
    "initial_capacity",
    "max_capacity",
)
_CHOICES = {
    "combiner": ("mean", "sum", "sqrtn"),
    "missing": ("initial", "zeros"),
    "out_of_vocabulary": ("raise", "zeros"),
    "check_mode": ("raise", "warn", "count"),
    "storage": ("auto", "hbm", "host"),
    "embedding_dtype": ("float32", "float16", "bfloat16"),
}


def check_choice(argument: str, value: Any) -> None:
    """Raises a `ValueError` unless `value` is one of the choices of `argument`."""
    choices = _CHOICES[argument]
    if value not in choices:
        known = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{argument}` must be one of {known}. Received: {argument}={value!r}")


def check_placement(placement: Any, vocabulary_size: int | None) -> None:
    """Raises a `ValueError` unless `placement` is one that a table with this vocabulary can have."""
    known = ("auto", "default_device", "distributed", "replicated")
    rank = placement.removeprefix("localized:") if isinstance(placement, str) else ""
    if placement not in known and not (placement != rank and rank.isascii() and rank.isdecimal()):
        choices = ", ".join(f'"{choice}"' for choice in known)
        raise ValueError(
            f'`placement` must be one of {choices}, or "localized:r" with the number of a rank. Received: placement={placement!r}'
        )
    if placement == "replicated" and vocabulary_size is None:
        raise ValueError(
            '`placement` can be "replicated" only for a static table: set `vocabulary_size`. Received: vocabulary_size=None'
        )


def check_rounding(stochastic_rounding: Any, embedding_dtype: str) -> None:
    """Raises a `ValueError` unless rows of this type can be rounded as asked."""
    check_flags(stochastic_rounding=stochastic_rounding)
    if stochastic_rounding and embedding_dtype == "float32":
        raise ValueError(
            '`stochastic_rounding` needs an `embedding_dtype` of "float16" or "bfloat16". Received: '
            f"stochastic_rounding=True, embedding_dtype={embedding_dtype!r}"
        )


def check_name(name: Any) -> None:
    """Raises a `ValueError` unless a name is a string."""
    if not isinstance(name, str):
        raise ValueError(f"`name` must be a string. Received: name={name!r}")


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(eq=False)
class TableConfig:
    """Configuration of one table of a `DistributedEmbedding`.

    Features share a table by using the same `TableConfig` object. Two objects with the same name in one layer raise a `ValueError`.

    Example:

    >>> import sok_keras as sok
    >>> users = sok.TableConfig("users", None, 16)  # any 64-bit id
    >>> shops = sok.TableConfig("shops", 1000, 8)  # ids 0 to 999

    Args:
        name: Name of the table.
        vocabulary_size: An int for a static table, whose ids are `0` to `vocabulary_size - 1`. None for a dynamic table, which
            takes any 64-bit id and makes a row when training first sees the id.
        embedding_dim: Number of floats in a row.
        initializer: Keras initializer of new rows. A row's first value is a function of seed, key and column.
        optimizer: Keras optimizer, or its name, that updates the rows of the table, with a learning rate, a schedule and states of its own. Tables of a
            layer may share one. It takes its steps with the model's optimizer, which must be an `OptimizerWrapper`. None: the model's optimizer.
        combiner: How the rows of the ids along the last axis are combined: `"mean"`, `"sum"` or `"sqrtn"`. None: not at all.
        placement: Which ranks have the rows: `"distributed"` for each row on one rank, `"localized:r"` for all rows on rank r,
            `"replicated"` for all rows of a static table on every rank, or `"auto"` (also `"default_device"`, as in keras-rs) for
            `"replicated"` where a static table has at most 1 MiB of rows, else `"distributed"`. Without ranks it has no effect.
        max_ids_per_partition: Unused; accepted for compatibility with keras-rs.
        max_unique_ids_per_partition: Unused; accepted for compatibility with keras-rs.
        missing: What a lookup that does not insert returns for an id without a row: `"initial"` for its first value, or
            `"zeros"`.
        out_of_vocabulary: What an id outside a static table does: `"raise"`, or `"zeros"` to return zeros.
        out_of_vocabulary_key: An id whose row stands for unknown ids. In a static table, ids outside are looked up and trained as this id.
            In a dynamic table, it replaces `missing`: a lookup that does not insert, or that finds no room, returns the row of this id
            for an id without a row. Feed this id in place of rare ids to train its row.
        trainable: Whether training changes the table. If not, lookups insert no rows, its rows stay as they are, `time_to_live` removes
            none, and counts of policies are neither halved nor forgotten. A layer reads it when it is made.
        seed: Seed of first values, an int. None: drawn as Keras draws the seeds of initializers.
        initial_capacity: Number of rows to allocate at once.
        max_capacity: Maximal number of rows. None: as many as fit into memory.
        check_mode: What happens to a batch whose new ids do not fit. `"raise"` raises `TableFullError` and changes nothing.
            `"warn"` and `"count"` insert the ids that fit.
        eviction: Which rows a dynamic table at `max_capacity` removes to make room: `"lru"`, `"lfu"`, or a policy of
            `sok_keras.policies`. None: it removes none.
        admission: Which new ids get a row in training: a policy of `sok_keras.policies`. None: all.
        time_to_live: After which time without training a row of a dynamic table goes: a number of steps, a `datetime.timedelta`, or
            `sok_keras.policies.TimeToLive(...)`. None: it stays.
        embedding_dtype: Type in which rows are stored: `"float32"`, or `"float16"` or `"bfloat16"` for half the memory. Optimizer states and
            all arithmetic are float32. A row is rounded to the nearest when it is stored.
        stochastic_rounding: Whether updates round rows of 16 bits by chance instead of to the nearest, so that steps which are smaller
            than the distance between two numbers are not lost. The chance is a function of seed, step, id and column.
        initial_value: Rows `(n, embedding_dim)` of the keys from 0 to n - 1, which the table has when its layer is built. An array, or what has a shape and
            gives parts by slices, such as a memory-mapped file. Every rank gives the same. It is no part of the configuration that is saved.
        storage: `"hbm"` for the memory of the GPU that the model runs on, `"host"` for the memory of the host, or `"auto"` for
            `"hbm"` where there is a GPU. If the model runs on a GPU, ids and rows of a table on the host are copied in each step.
    """

    name: str
    vocabulary_size: int | None
    embedding_dim: int
    initializer: Any = dataclasses.field(default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out"))
    optimizer: Any = None
    combiner: str | None = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    _: dataclasses.KW_ONLY
    missing: str = "initial"
    out_of_vocabulary: str = "raise"
    out_of_vocabulary_key: int | None = None
    trainable: bool = True
    seed: int | None = None
    initial_capacity: int = 0
    max_capacity: int | None = None
    check_mode: str = "raise"
    storage: str = "auto"
    eviction: Eviction | str | None = None
    admission: Admission | None = None
    time_to_live: TimeToLive | datetime.timedelta | int | None = None
    embedding_dtype: str = "float32"
    stochastic_rounding: bool = False
    initial_value: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        for argument in _INTEGERS:
            setattr(self, argument, as_python_int(getattr(self, argument)))
        self.initializer = keras.initializers.get(self.initializer)
        self.optimizer = get_optimizer(self.optimizer)
        check_placement(self.placement, self.vocabulary_size)
        for argument in _CHOICES:
            if argument != "combiner" or self.combiner is not None:
                check_choice(argument, getattr(self, argument))

        check_rounding(self.stochastic_rounding, self.embedding_dtype)
        self.eviction = get_eviction(self.eviction)
        self.admission = get_admission(self.admission)
        self.time_to_live = get_time_to_live(self.time_to_live)
        for policy in ("eviction", "admission", "time_to_live"):
            check_is_dynamic(policy, getattr(self, policy), self.vocabulary_size)
        check_eviction(self.eviction, self.max_capacity)
        self._check_out_of_vocabulary_key()
        if self.initial_value is not None:
            self.initial_value = self._checked_value()

    def _checked_value(self) -> Any:
        """Returns the rows that the table starts with, if it can have them."""
        value = self.initial_value if hasattr(self.initial_value, "shape") else np.asarray(self.initial_value)
        kind = keras.ops.convert_to_numpy(value[:1]).dtype.kind if len(value.shape) else "f"
        if kind not in "fiu":
            raise ValueError(f"`initial_value` must have numbers. Received: {value!r:.100}")
        if len(value.shape) != 2 or value.shape[1] != self.embedding_dim:
            raise ValueError(
                f"`initial_value` must have the shape (n, {self.embedding_dim}). Received: shape {tuple(value.shape)}"
            )
        for argument in ("vocabulary_size", "max_capacity"):
            most = getattr(self, argument)
            if most is not None and value.shape[0] > most:
                raise ValueError(
                    f"`initial_value` must have at most `{argument}` rows, {most}. Received: {value.shape[0]} rows"
                )
        return value

    def _check_out_of_vocabulary_key(self) -> None:
        key, size = self.out_of_vocabulary_key, self.vocabulary_size
        if key is None:
            return
        first, end = (-(2**63), 2**64) if size is None else (0, size)
        if not isinstance(key, int) or not first <= key < end:
            ids = "a 64-bit integer" if size is None else f"one of the table's ids, 0 to {size - 1},"
            raise ValueError(f"`out_of_vocabulary_key` must be {ids} or None. Received: out_of_vocabulary_key={key!r}")
        if self.out_of_vocabulary != "raise":
            raise ValueError(
                "`out_of_vocabulary` must not be given with `out_of_vocabulary_key`, which says what ids outside do. Received: "
                f"out_of_vocabulary={self.out_of_vocabulary!r}, out_of_vocabulary_key={key!r}"
            )

    def get_config(self) -> dict[str, Any]:
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "initial_value"}
        for name in ("initializer", "eviction", "admission", "time_to_live"):
            config[name] = keras.saving.serialize_keras_object(getattr(self, name))
        config["optimizer"] = optimizer_config(self.optimizer)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TableConfig":
        config = dict(config)
        config["initializer"] = keras.saving.deserialize_keras_object(config["initializer"])
        return cls(**config)
