"""Embedding tables for recommender models in Keras 3: any 64-bit id, tables in a Rust core, on TensorFlow, JAX and PyTorch.

Names are imported when they are first used, so that tools that read dumps need neither Keras nor a framework.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from sok_keras.whole_package import WholePackage

if TYPE_CHECKING:
    from sok_keras import callbacks, initializers, optimizers, planner, policies
    from sok_keras.distributed import (
        all_reduce,
        barrier,
        broadcast,
        init,
        local_rank,
        rank,
        size,
        world_size,
    )
    from sok_keras.dump_handle import DumpHandle
    from sok_keras.errors import VERSION as __version__
    from sok_keras.errors import (
        CorruptDumpError,
        DeviceError,
        DumpError,
        DumpMismatchError,
        RankError,
        SokError,
        TableFullError,
        TicketError,
        UnknownChangesError,
        UnwrappedOptimizerError,
    )
    from sok_keras.keras_api import (
        DistributedEmbedding,
        DynamicEmbedding,
        EvictedRows,
        Explanation,
        FeatureConfig,
        LoadReport,
        OptimizerWrapper,
        Outcomes,
        Profile,
        Table,
        TableConfig,
        TableContents,
        TableStats,
        dump,
        dump_increment,
        load,
        prefetch,
        shard,
    )
    from sok_keras.manifest import Manifest, compact, read_manifest, verify
    from sok_keras.strings import string_keys

__all__ = [
    "SGD",
    "CorruptDumpError",
    "DeviceError",
    "DistributedEmbedding",
    "DumpError",
    "DumpHandle",
    "DumpMismatchError",
    "DynamicEmbedding",
    "DynamicVariable",
    "EvictedRows",
    "Explanation",
    "FeatureConfig",
    "LoadReport",
    "Manifest",
    "OptimizerWrapper",
    "Outcomes",
    "Profile",
    "RankError",
    "SokError",
    "Table",
    "TableConfig",
    "TableContents",
    "TableFullError",
    "TableStats",
    "TicketError",
    "UnknownChangesError",
    "UnwrappedOptimizerError",
    "Variable",
    "__version__",
    "all2all_dense_embedding",
    "all_reduce",
    "assign",
    "barrier",
    "broadcast",
    "callbacks",
    "compact",
    "dump",
    "dump_increment",
    "export",
    "exporters",
    "filter_variables",
    "importers",
    "incremental_model_dump",
    "init",
    "initializers",
    "load",
    "local_rank",
    "lookup_sparse",
    "optimizers",
    "planner",
    "policies",
    "prefetch",
    "rank",
    "read_manifest",
    "shard",
    "size",
    "string_keys",
    "triggers",
    "verify",
    "world_size",
]

_WITHOUT_KERAS = {
    "DumpHandle": "dump_handle",
    "Manifest": "manifest",
    **dict.fromkeys(
        ("all_reduce", "barrier", "broadcast", "init", "local_rank", "rank", "size", "world_size"), "distributed"
    ),
    "compact": "manifest",
    "read_manifest": "manifest",
    "string_keys": "strings",
    "verify": "manifest",
}


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__" or name.endswith("Error"):
        module = importlib.import_module("sok_keras.errors")
        value = module.VERSION if name == "__version__" else getattr(module, name)
    else:
        value = getattr(importlib.import_module(f"sok_keras.{_WITHOUT_KERAS.get(name, 'keras_api')}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


if "keras" in sys.modules:
    importlib.import_module("sok_keras.keras_api")
else:
    sys.meta_path.insert(0, WholePackage())
