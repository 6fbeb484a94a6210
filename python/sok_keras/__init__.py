"""Embedding tables for recommender models in Keras 3: any 64-bit id, tables in a Rust core, on TensorFlow, JAX and PyTorch."""

from sok_keras import callbacks, optimizers
from sok_keras.backend import native as _native
from sok_keras.backend.native_errors import (
    CorruptDumpError,
    DeviceError,
    DumpError,
    DumpMismatchError,
    SokError,
    TableFullError,
    TicketError,
    UnwrappedOptimizerError,
)
from sok_keras.checkpoint import LoadReport, Manifest, dump, load, read_manifest, verify
from sok_keras.feature_config import FeatureConfig
from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.layers.dynamic_embedding import DynamicEmbedding
from sok_keras.optimizer import OptimizerWrapper
from sok_keras.table import Outcomes, Table, TableContents, TableStats
from sok_keras.table_config import TableConfig

__version__ = _native.VERSION

__all__ = [
    "CorruptDumpError",
    "DeviceError",
    "DistributedEmbedding",
    "DumpError",
    "DumpMismatchError",
    "DynamicEmbedding",
    "FeatureConfig",
    "LoadReport",
    "Manifest",
    "OptimizerWrapper",
    "Outcomes",
    "SokError",
    "Table",
    "TableConfig",
    "TableContents",
    "TableFullError",
    "TableStats",
    "TicketError",
    "UnwrappedOptimizerError",
    "__version__",
    "callbacks",
    "dump",
    "load",
    "optimizers",
    "read_manifest",
    "verify",
]
