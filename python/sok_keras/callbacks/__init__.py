"""Keras callbacks."""

from sok_keras.callbacks.distributed import Distributed
from sok_keras.callbacks.dump_checkpoint import DumpCheckpoint
from sok_keras.callbacks.early_stopping import EarlyStopping
from sok_keras.callbacks.table_statistics import TableStatistics

__all__ = ["Distributed", "DumpCheckpoint", "EarlyStopping", "TableStatistics"]
