"""What a plan must know about the ids of each table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sok_keras.feature_config import FeatureConfig
from sok_keras.table_config import TableConfig, check_choice, check_placement

# Ranks of ids are grouped, so that a table of 10^9 rows takes as long as one of 10^6.
_NUM_GROUPS = 4096


@dataclasses.dataclass(frozen=True)
class ParameterConstraints:
    """What a plan may choose for a table, and what is known about its ids.

    Args:
        placements: Placements of `TableConfig` from which to choose. None: `"distributed"`, each `"localized:r"`, and `"replicated"` for
            what `placement="auto"` would replicate.
        storages: `"hbm"`, `"host"` or both. None: what `TableConfig.storage` says, both if that is `"auto"`.
        num_rows: Rows of the table when it has grown. None: `vocabulary_size`, `max_capacity`, or from `samples`.
        hotness: Ids of the table in a sample, of all features together. None: from `samples` or the features' shapes, otherwise 1.
        skew: Exponent of the power law of the ids: the id at rank r comes with a probability in proportion to r^-skew. 0: all alike.
            Ignored with `samples`.
        samples: Ids of the table as batches have them: `(N,)` for one id a sample, `(N, hotness)`, or a list with the ids of each sample.
        growth: How many times as many rows the table will have as `samples` have different ids.
    """

    placements: Sequence[str] | None = None
    storages: Sequence[str] | None = None
    num_rows: int | None = None
    hotness: float | None = None
    skew: float = 1.05
    samples: Any = None
    growth: float = 1.0

    def __post_init__(self) -> None:
        for placement in self.placements or ():
            check_placement(placement, 1)
        for storage in self.storages or ():
            check_choice("storage", storage)
        for name in ("num_rows", "hotness", "growth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be a positive number. Received: {name}={value!r}")
        if not self.skew >= 0:
            raise ValueError(f"`skew` must not be negative. Received: skew={self.skew!r}")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The ids of a table.

    Args:
        num_rows: Rows of the table.
        hotness: Ids in a sample.
        bags: Output rows of a sample.
        groups: Numbers of ids, and the probability of each id of a group, `(2, G)` float64.
    """

    num_rows: int
    hotness: float
    bags: float
    groups: np.ndarray

    def distinct(self, num_ids: float) -> float:
        """Returns the expected number of different ids among so many."""
        counts, probabilities = self.groups
        # An id is missed by n draws with the probability (1 - p)^n.
        return float(-(counts * np.expm1(num_ids * np.log1p(-np.minimum(probabilities, 1 - 1e-12)))).sum())


def power_law(num_rows: int, skew: float) -> np.ndarray:
    """Returns groups of ids whose probabilities fall with their ranks, `(2, G)` float64: the ids of each, and the probability of one."""
    bounds = np.unique(np.geomspace(1, num_rows + 1, _NUM_GROUPS).round().astype(np.int64))
    first, end = bounds[:-1].astype(float), bounds[1:].astype(float)
    counts = end - first
    weights = np.sqrt(first * np.maximum(end - 1, 1)) ** -skew
    return np.stack([counts, weights / (counts * weights).sum()])


def _ids_of(samples: Any) -> tuple[np.ndarray, float]:
    """Returns all ids of samples, and how many a sample has."""
    if isinstance(samples, list | tuple) and samples and not np.isscalar(samples[0]):
        lists = [np.asarray(ids).reshape(-1) for ids in samples]
        return np.concatenate(lists), sum(map(len, lists)) / len(lists)
    ids = np.asarray(samples)
    return ids.reshape(-1), ids.size / max(len(ids), 1) if ids.ndim else 1.0


def workload_of(config: TableConfig, features: Sequence[FeatureConfig], constraints: ParameterConstraints) -> Workload:
    """Returns what is known about the ids of a table.

    Raises:
        ValueError: If nothing says how many rows a dynamic table will have.
    """
    hotness, num_rows, groups = constraints.hotness, constraints.num_rows, None
    num_features = max(len(features), 1)
    if constraints.samples is not None:
        ids, of_samples = _ids_of(constraints.samples)
        if not ids.size:
            raise ValueError(f"`samples` of table {config.name!r} must hold ids. Received: none")
        counts = np.unique(ids, return_counts=True)[1]
        sizes, numbers = np.unique(counts, return_counts=True)
        groups = np.stack([numbers.astype(float), sizes / counts.sum()])
        hotness = hotness or of_samples
        num_rows = num_rows or config.vocabulary_size or int(np.ceil(len(counts) * constraints.growth))
    num_rows = num_rows or config.vocabulary_size or config.max_capacity
    if num_rows is None:
        raise ValueError(
            f"table {config.name!r} is dynamic: set `num_rows` or `samples` in its `ParameterConstraints`, or its `max_capacity`, so that "
            "the plan knows how many rows it will have"
        )
    if hotness is None:
        shapes = [tuple(feature.input_shape or ()) for feature in features]
        of_shapes = [shape[-1] if len(shape) > 1 and shape[-1] else 1 for shape in shapes]
        hotness = float(sum(of_shapes)) if of_shapes else 1.0
    if groups is None:
        groups = power_law(int(num_rows), constraints.skew)
    bags = float(num_features) if config.combiner is not None else float(hotness)
    return Workload(int(num_rows), float(hotness), bags, groups)


def tables_of(configs: Any) -> dict[str, tuple[TableConfig, list[FeatureConfig]]]:
    """Returns the tables of a structure of `TableConfig` or `FeatureConfig`, by name, with the features of each.

    Raises:
        ValueError: If there is none, if two have the same name, or if the structure has something else.
    """
    tables: dict[str, tuple[TableConfig, list[FeatureConfig]]] = {}
    for config in keras.tree.flatten(configs):
        feature = config if isinstance(config, FeatureConfig) else None
        table = feature.table if feature else config
        if not isinstance(table, TableConfig):
            raise ValueError(f"`configs` must hold `TableConfig` or `FeatureConfig` objects. Received: {config!r}")
        known, features = tables.setdefault(table.name, (table, []))
        if known is not table:
            raise ValueError(f"two tables must not have the same name. Received: two with the name {table.name!r}")
        if feature:
            features.append(feature)
    if not tables:
        raise ValueError("`configs` must hold at least one table. Received: none")
    return tables


def constraints_of(constraints: Mapping[str, ParameterConstraints] | None, names: Sequence[str]) -> dict:
    """Returns the constraints of each table.

    Raises:
        ValueError: If some are for a table that is not there.
    """
    unknown = set(constraints or ()) - set(names)
    if unknown:
        raise ValueError(f"`constraints` must be for tables of the plan. Received: constraints of {sorted(unknown)}")
    return {name: (constraints or {}).get(name, ParameterConstraints()) for name in names}
