"""Configuration of a feature."""

import dataclasses
from typing import Any

import keras

from sok_keras.policies import as_python_int
from sok_keras.table_config import TableConfig, check_name


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(eq=False)
class FeatureConfig:
    """Configuration of one input of a `DistributedEmbedding`.

    Example:

    >>> import sok_keras as sok
    >>> movies = sok.TableConfig("movies", None, 16)
    >>> features = [sok.FeatureConfig(name, movies) for name in ("watched", "candidate")]  # they share a table

    Args:
        name: Name of the feature, which error messages use.
        table: `TableConfig` of the table that its ids are looked up in.
        input_shape: Shape of the ids with the batch axis, or None for any. Axes that are None are not checked.
        output_shape: Shape of the rows with the batch axis, or None for any.
        padding_key: An id that means "no id", as in `DynamicEmbedding`. None: every id is looked up.
    """

    name: str
    table: TableConfig
    input_shape: tuple | None = None
    output_shape: tuple | None = None
    padding_key: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        self.padding_key = as_python_int(self.padding_key)
        if not isinstance(self.table, TableConfig):
            raise ValueError(f"`table` must be a `TableConfig`. Received: table={self.table!r} (feature {self.name!r})")

    def get_config(self) -> dict[str, Any]:
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        config["table"] = keras.saving.serialize_keras_object(self.table)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FeatureConfig":
        config = dict(config)
        config["table"] = keras.saving.deserialize_keras_object(config["table"])
        return cls(**config)
