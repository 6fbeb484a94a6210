"""The choices for one table."""

import dataclasses
from typing import Any

import keras

_CHOICES = {
    "combiner": ("mean", "sum", "sqrtn"),
    "placement": ("auto", "default_device"),
    "missing": ("initial", "zeros"),
    "out_of_vocabulary": ("raise", "zeros"),
    "check_mode": ("raise", "warn", "count"),
    "storage": ("auto", "hbm", "host"),
}


def check_choice(argument: str, value: Any) -> None:
    """Raises a `ValueError` unless `value` is one of the known ones."""
    choices = _CHOICES[argument]
    if value not in choices:
        known = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{argument}` must be one of {known}. Received: {argument}={value!r}")


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(eq=False)
class TableConfig:
    """The choices for one table of a `DistributedEmbedding`.

    Features share a table by using the same object. Two objects of one name in a layer are a `ValueError`.

    Args:
        name: Name of the table.
        vocabulary_size: int, ids are `0` to `vocabulary_size - 1`; or None for a dynamic table: any 64-bit id, rows are made
            when training first meets them.
        embedding_dim: Floats in a row.
        initializer: Keras initializer of new rows: a row's first value is a function of seed, key and column.
        optimizer: None: the optimizer that the model is compiled with.
        combiner: `"mean"`, `"sum"` or `"sqrtn"`: how ids along the last axis become one row.
        placement: `"auto"` or `"default_device"`: today the same; tables lie where `storage` says.
        max_ids_per_partition: Accepted for keras-rs' sake; unused.
        max_unique_ids_per_partition: As above.
        missing: What an id without a row answers: `"initial"`, the row that training would have made, or `"zeros"`.
        out_of_vocabulary: `"raise"` or `"zeros"`, for ids outside a static table.
        seed: int; None: drawn as Keras draws the seeds of initializers.
        initial_capacity: Rows to make room for at once.
        max_capacity: Rows at most; None: as many as memory holds.
        check_mode: What a batch does that does not fit: `"raise"` (it changes nothing), `"warn"` or `"count"`.
        storage: Which memory: `"hbm"`, the memory of the GPU that the model runs on; `"host"`; or `"auto"`: `"hbm"` where
            there is one. Under a model on a GPU, ids and rows of host tables cross in each step.
    """

    name: str
    vocabulary_size: int | None
    embedding_dim: int
    initializer: Any = dataclasses.field(default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out"))
    optimizer: None = None
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    _: dataclasses.KW_ONLY
    missing: str = "initial"
    out_of_vocabulary: str = "raise"
    seed: int | None = None
    initial_capacity: int = 0
    max_capacity: int | None = None
    check_mode: str = "raise"
    storage: str = "auto"

    def __post_init__(self) -> None:
        self.initializer = keras.initializers.get(self.initializer)
        if self.optimizer is not None:
            raise ValueError(
                "`optimizer` must be None: all tables are updated by the optimizer that the model is compiled with. "
                f"Received: optimizer={self.optimizer!r}"
            )
        for argument in _CHOICES:
            check_choice(argument, getattr(self, argument))

    def get_config(self) -> dict[str, Any]:
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        config["initializer"] = keras.saving.serialize_keras_object(self.initializer)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TableConfig":
        config = dict(config)
        config["initializer"] = keras.saving.deserialize_keras_object(config["initializer"])
        return cls(**config)
