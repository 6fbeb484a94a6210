"""The choices for one feature."""

import dataclasses
from typing import Any

import keras

from sok_keras.table_config import TableConfig


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(eq=False)
class FeatureConfig:
    """One input of a `DistributedEmbedding`.

    Args:
        name: Name of the feature, for messages.
        table: The table that answers its ids.
        input_shape: Shape of the ids with the batch axis, or None; checked where it is known.
        output_shape: Shape of the rows with the batch axis, or None; checked likewise.
        padding_key: An id that stands for "no id here"; None: every id is one.
    """

    name: str
    table: TableConfig
    input_shape: tuple | None = None
    output_shape: tuple | None = None
    padding_key: int | None = None

    def __post_init__(self) -> None:
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
