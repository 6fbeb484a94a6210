"""Embeddings of other systems and files, imported into tables.

Each function reads its source in pieces and shows a progress bar. A key that has a row gets the row that was read; the other rows of a
table stay. With many ranks all call the function with the same source, read their share of it, and send the rows to their owners.
"""

from sok_keras.importers.columns import numpy, parquet
from sok_keras.importers.dynamicemb_dumps import dynamicemb
from sok_keras.importers.frameworks import keras, torch
from sok_keras.importers.sok_dumps import sok
from sok_keras.importers.tfra_files import tfra

__all__ = ["dynamicemb", "keras", "numpy", "parquet", "sok", "tfra", "torch"]
