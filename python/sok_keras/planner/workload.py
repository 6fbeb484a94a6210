"""What a plan must know about the ids of each table."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sok_keras.feature_config import FeatureConfig
from sok_keras.table_config import TableConfig, check_choice, check_placement

# Ranks of ids are grouped, so that a table of 10^9 rows takes as long as one of 10^6.
_NUM_GROUPS = 4096


@dataclasses.dataclass(frozen=True, eq=False)
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
        samples: Ids of the table as batches have them, without padding: `(N,)` for one id a sample, `(N, hotness)`, or a list with the ids of
            each sample. Ids that were not seen have as much probability as those that were seen once.
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
        for name, check in (
            # Whether a table can be replicated depends on the table.
            ("placements", lambda value: check_placement(value, 1)),
            ("storages", lambda value: check_choice("storage", value)),
        ):
            values = getattr(self, name)
            if values is None:
                continue
            if isinstance(values, str) or not len(values):
                raise ValueError(
                    f"`{name}` must be a list with at least one of them, or None. Received: {name}={values!r}"
                )
            for value in values:
                check(value)
        for name in ("hotness", "growth"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float | np.number) and 0 < value < math.inf):
                raise ValueError(f"`{name}` must be a positive number. Received: {name}={value!r}")
        if self.num_rows is not None and not (
            isinstance(self.num_rows, int | np.integer) and 0 < self.num_rows < 2**62
        ):
            raise ValueError(f"`num_rows` must be a positive int. Received: num_rows={self.num_rows!r}")
        if not (isinstance(self.skew, int | float | np.number) and 0 <= self.skew < math.inf):
            raise ValueError(f"`skew` must be a number of at least 0. Received: skew={self.skew!r}")


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


def _ids_of(name: str, samples: Any) -> tuple[np.ndarray, float]:
    """Returns all ids of samples, and how many a sample has.

    Raises:
        ValueError: If there are none, or something else than ids.
    """
    if isinstance(samples, list | tuple) and len(samples) and np.ndim(samples[0]) > 0:
        lists = [np.asarray(ids) for ids in samples]
        ids = np.concatenate([some for some in lists if some.size] or [np.zeros(0, "int64")], axis=None)
        is_right = all(some.ndim == 1 for some in lists)
        hotness = ids.size / len(lists)
    else:
        ids = np.asarray(samples)
        is_right, hotness = ids.ndim in (1, 2), ids.size / max(len(ids), 1) if ids.ndim else 0.0
    if not is_right or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(
            f"`samples` of table {name!r} must hold ids, `(N,)`, `(N, hotness)` or a list with those of each sample. Received: an array "
            f"{ids.shape} of {ids.dtype}"
        )
    return ids.reshape(-1), hotness


def _groups_of(counts: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns groups of ids, as `power_law`, from how often each came in samples.

    The ids that were not seen have the probability of those that were seen once (Good, 1953).
    """
    sizes, numbers = np.unique(counts, return_counts=True)
    unseen = max(num_rows - len(counts), 0)
    of_unseen = (counts == 1).sum() / counts.sum() if unseen else 0.0
    groups = np.stack([numbers, sizes / counts.sum() * (1 - of_unseen)])
    return np.append(groups, [[unseen], [of_unseen / unseen]], axis=1) if unseen else groups


def workload_of(config: TableConfig, features: Sequence[FeatureConfig], constraints: ParameterConstraints) -> Workload:
    """Returns what is known about the ids of a table.

    Raises:
        ValueError: If nothing says how many rows a dynamic table will have.
    """
    hotness, num_rows, counts = constraints.hotness, constraints.num_rows, None
    most = config.vocabulary_size or config.max_capacity
    if num_rows is not None and most is not None and num_rows > most:
        raise ValueError(
            f"`num_rows` of table {config.name!r} must be at most {most}, as its config says. Received: num_rows={num_rows}"
        )
    if constraints.samples is not None:
        ids, of_samples = _ids_of(config.name, constraints.samples)
        hotness = hotness or of_samples
        counts = np.unique(ids, return_counts=True)[1]
        grown = math.ceil(len(counts) * constraints.growth)
        num_rows = num_rows or config.vocabulary_size or min(grown, most or grown)
    num_rows = num_rows or most
    if num_rows is None:
        raise ValueError(
            f"table {config.name!r} is dynamic: set `num_rows` or `samples` in its `ParameterConstraints`, or its `max_capacity`, so that "
            "the plan knows how many rows it will have"
        )
    shapes = [tuple(length or 1 for length in (feature.input_shape or (1,))[1:]) or (1,) for feature in features]
    if hotness is None:
        hotness = sum(math.prod(shape) for shape in shapes) or 1
    bags = (sum(math.prod(shape[:-1]) for shape in shapes) or 1) if config.combiner is not None else hotness
    groups = power_law(int(num_rows), constraints.skew) if counts is None else _groups_of(counts, int(num_rows))
    return Workload(int(num_rows), float(hotness), float(bags), groups)


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
    for name, value in (constraints or {}).items():
        if not isinstance(value, ParameterConstraints):
            raise ValueError(f"`constraints` must hold `ParameterConstraints`. Received: {value!r} for table {name!r}")
    return {name: (constraints or {}).get(name, ParameterConstraints()) for name in names}
