"""What of the package needs Keras. Importing it registers the layers with Keras, so that saved models find them."""

from sok_keras import backend, callbacks, exporters, importers, initializers, optimizers, planner, policies
from sok_keras.checkpoint import LoadReport, dump, dump_increment, load
from sok_keras.feature_config import FeatureConfig
from sok_keras.keras_extensions import extend_keras
from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.layers.dynamic_embedding import DynamicEmbedding
from sok_keras.optimizer import SGD, OptimizerWrapper
from sok_keras.prefetching import prefetch
from sok_keras.profile import Profile
from sok_keras.shards import shard
from sok_keras.table import EvictedRows, Explanation, Outcomes, Table, TableContents, TableStats
from sok_keras.table_config import TableConfig
from sok_keras.variables import (
    DynamicVariable,
    all2all_dense_embedding,
    assign,
    export,
    filter_variables,
    incremental_model_dump,
    lookup_sparse,
    triggers,
)

if backend.name == "tensorflow":
    from sok_keras.static_variables import Variable
else:
    from sok_keras.fixed_variables import Variable  # type: ignore[assignment]

__all__ = [
    "SGD",
    "DistributedEmbedding",
    "DynamicEmbedding",
    "DynamicVariable",
    "EvictedRows",
    "Explanation",
    "FeatureConfig",
    "LoadReport",
    "OptimizerWrapper",
    "Outcomes",
    "Profile",
    "Table",
    "TableConfig",
    "TableContents",
    "TableStats",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "callbacks",
    "dump",
    "dump_increment",
    "export",
    "exporters",
    "filter_variables",
    "importers",
    "incremental_model_dump",
    "initializers",
    "load",
    "lookup_sparse",
    "optimizers",
    "planner",
    "policies",
    "prefetch",
    "shard",
    "triggers",
]

extend_keras()
