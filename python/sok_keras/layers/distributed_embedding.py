"""A layer over many tables and features, which one native call looks up."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from sok_keras import ids, preprocessing
from sok_keras.feature_config import FeatureConfig
from sok_keras.keys import signed_key
from sok_keras.layers.base import TableLayer, axis_of, table_core_config, table_seed
from sok_keras.layers.dynamic_embedding import set_tables
from sok_keras.table import Table
from sok_keras.table_config import TableConfig
from sok_keras.table_optimizers import get_optimizer, optimizer_config


def _map_up_to(structure: Any, function: Callable, *trees: Any) -> Any:
    """`function(leaf, *subtrees)` for each `FeatureConfig` of `structure`, in the structure's own form. Trees go as deep as the
    structure; what lies below, as `{"low", "high"}`, is the leaf's."""
    if isinstance(structure, FeatureConfig):
        return function(structure, *trees)
    if not isinstance(structure, list | tuple | dict):
        raise ValueError(f"`feature_configs` must be nested `FeatureConfig`s. Received: {structure!r}")
    for tree in trees:
        if type(tree) is not type(structure) and not (
            isinstance(structure, list | tuple) and isinstance(tree, list | tuple)
        ):
            raise ValueError(
                f"Ids, weights and scores must be nested as `feature_configs` is, here a {type(structure).__name__}. Received: {type(tree).__name__}"
            )
        if len(tree) != len(structure) or (isinstance(structure, dict) and set(tree) != set(structure)):
            names = sorted(structure) if isinstance(structure, dict) else f"{len(structure)} of them"
            raise ValueError(
                f"Ids, weights and scores must be nested as `feature_configs` is: {names}. Received: {_outline(tree)}"
            )
    if isinstance(structure, dict):
        return {key: _map_up_to(structure[key], function, *(tree[key] for tree in trees)) for key in structure}
    mapped = [_map_up_to(part, function, *parts) for part, *parts in zip(structure, *trees, strict=True)]
    return tuple(mapped) if isinstance(structure, tuple) else mapped


def _outline(tree: Any) -> Any:
    return sorted(tree) if isinstance(tree, dict) else f"{len(tree)} of them"


def _leaves(structure: Any) -> list[FeatureConfig]:
    leaves: list[FeatureConfig] = []
    _map_up_to(structure, leaves.append)
    return leaves


@keras.saving.register_keras_serializable(package="sok_keras")
class DistributedEmbedding(TableLayer):
    """Looks up many features in many tables by one native call. Tables may be static or dynamic, and of different dims.

    Rows are not Keras variables. Compile the model with `OptimizerWrapper(optimizer)`, which trains them.

    Example:

    >>> import keras, sok_keras as sok
    >>> users = sok.TableConfig("users", None, 16, combiner="sum")
    >>> layer = sok.DistributedEmbedding({"user": sok.FeatureConfig("user", users), "friends": sok.FeatureConfig("friends", users)})
    >>> rows = layer({"user": keras.Input((1,), dtype="int32"), "friends": keras.Input((20,), dtype="int32")})
    >>> rows["friends"].shape
    (None, 16)

    Args:
        feature_configs: A `FeatureConfig`, or lists, tuples and dicts of them. Features share a table by using the same
            `TableConfig` object.
        table_stacking: Unused; accepted for compatibility with keras-rs. Tables of a layer are always looked up together.
        update_stats: Unused; accepted for compatibility with keras-rs.
        save_rows: Whether `.keras` files, weights files, PyTorch's state dicts and TensorFlow's checkpoints hold the rows. For large
            tables use `sok_keras.dump`.

    Call arguments:
        inputs: Ids, nested as `feature_configs`.
        weights: Floats, nested as `feature_configs`, one for each id. None: every id has weight 1.
        training: When ids without a row get one. True: at once; with an `admission` policy as for None. None: when the optimizer applies
            a gradient of this call. False: never.
        scores: Integers, nested as `feature_configs`, one for each id of a table with `eviction=sok_keras.policies.Custom()`; None for
            features of other tables. None: scores of rows stay as they are.

    Input shape:
        Nested as `feature_configs`: for each feature ids and weights of any form that `DynamicEmbedding` takes.

    Output shape:
        Nested as `feature_configs`: `(batch, ..., embedding_dim)`. The last axis of the ids is combined, unless they have one axis or the
        table has `combiner=None`. If an axis before `embedding_dim` is ragged, the output has the form of the ids, as in
        `DynamicEmbedding`.
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        table_stacking: Any = "auto",
        update_stats: bool = False,
        save_rows: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_rows=save_rows, **kwargs)
        self._structure = _Structure(feature_configs)
        self.supports_masking = any(config.padding_key is not None for config in self._structure.features)
        self.table_stacking = table_stacking
        self.update_stats = update_stats
        names = [table.name for table in self._structure.tables]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(
                f"Tables of a layer need different names; features share a table by using one `TableConfig` object. Received: "
                f"several tables named {doubled}"
            )
        core_configs = [table_core_config(table, self.name) for table in self._structure.tables]
        self._make_core(core_configs, self._structure.tables)

    @property
    def feature_configs(self) -> Any:
        """The `FeatureConfig`s as they were given."""
        return self._structure.feature_configs

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None, scores: Any = None) -> Any:
        features, ordered, tensors, floats = self._features(inputs, weights, scores)
        rows = self._lookup_in_parts(features, tensors, floats, training)
        shaped = [
            ids.rows_like(value, row, axis)
            for value, row, (_, _, _, axis, *_) in zip(ordered, rows, features, strict=True)
        ]
        return self._structure.pack(shaped)

    def _features(self, inputs: Any, weights: Any, scores: Any = None) -> tuple[list, list, list, list]:
        """Returns, for each feature, what a plan has of it, its ids in order, their tensors and those of their scores, and their weights."""
        structure = self._structure
        given = structure.flatten(inputs)
        given_weights, given_scores = (
            [None] * len(given) if numbers is None else structure.flatten(numbers) for numbers in (weights, scores)
        )
        features, tensors, floats, ordered = [], [], [], []
        for config, value, weight, score in zip(structure.features, given, given_weights, given_scores, strict=True):
            combiner = config.table.combiner
            value = preprocessing.ids_of(value, config.padding_key, config.name)
            _check_shape("input_shape", config.input_shape, ids.shape_of(value), config.name)
            reduces = combiner is not None
            value, weight, score = (ids.in_order(one, config.name, reduces) for one in (value, weight, score))
            ordered.append(value)
            axis = axis_of(value, reduces)
            weight = ids.weights_of(weight, value, config.name)
            score = ids.scores_of(score, value, config.name, config.table.eviction)
            if axis == "each" and combiner in ("mean", "sqrtn"):
                weight = None  # of one id, they cancel
            table = structure.table_numbers[id(config.table)]
            words = ids.has_words(value)
            ids.check_padding_key(config.padding_key)
            padding_key = signed_key(config.padding_key)
            flags = (weight is not None, score is not None)
            features.append((config.name, table, words, axis, *flags, combiner or "sum", padding_key))
            of_ids = ids.in_vocabulary(ids.tensors_of(value, config.name, axis), words, config.table, padding_key)
            tensors.append(of_ids if score is None else (*of_ids, score))
            floats.append(weight)
        return features, ordered, tensors, floats

    def _prefetch(self, inputs: Any) -> None:
        features, _, tensors, weights = self._features(inputs, None)
        trains = [number for number, is_frozen in enumerate(self._frozen_features()) if not is_frozen]
        if trains and all(weights[number] is None for number in trains):
            self._tell(tuple(features[number] for number in trains), [tensors[number] for number in trains])

    def _frozen_features(self) -> list[bool]:
        """Of each feature: whether its table had `trainable=False` when the layer was made."""
        return [config.table.name in self._core.frozen for config in self._structure.features]

    def _lookup_in_parts(self, features: list, tensors: list, weights: list, training: bool | None) -> list:
        """Looks up all features. One native call serves the trainable tables, a second one the frozen tables."""
        frozen = self._frozen_features()
        rows: list = [None] * len(features)
        for is_frozen in sorted(set(frozen)):
            chosen = [number for number, of_feature in enumerate(frozen) if of_feature == is_frozen]
            parts = [[values[number] for number in chosen] for values in (features, tensors, weights)]
            found = self._lookup(tuple(parts[0]), parts[1], parts[2], training, is_frozen)
            for number, of_feature in zip(chosen, found, strict=True):
                rows[number] = of_feature
        return rows

    def preprocess(
        self, inputs: Any, weights: Any = None, training: bool | None = None, *, ragged: bool = False
    ) -> Any:
        """Converts ids on the host to what `call` takes on this backend; see `DynamicEmbedding.preprocess`.

        Args:
            inputs: Ids, nested as `feature_configs`: arrays, or lists of lists.
            weights: Floats of the same nesting and lengths. None: no id has a weight.
            training: Ignored.
            ragged: Whether lists of different lengths become row splits, without padding.

        Returns:
            The ids, or `(ids, weights)` if any feature has weights, nested as `feature_configs`.
        """
        del training
        structure = self._structure
        given = structure.flatten(inputs)
        given_weights = [None] * len(given) if weights is None else structure.flatten(weights)
        made = [
            preprocessing.preprocess(value, weight, config.padding_key, ragged, config.name)
            for config, value, weight in zip(structure.features, given, given_weights, strict=True)
        ]
        if not any(isinstance(one, tuple) for one in made):
            return structure.pack(made)
        pairs = [one if isinstance(one, tuple) else (one, preprocessing.ones_for(one)) for one in made]
        return structure.pack([one for one, _ in pairs]), structure.pack([weight for _, weight in pairs])

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        del mask

        def mask_of(config: FeatureConfig, value: Any) -> Any:
            reduces = config.table.combiner is not None
            value = preprocessing.ids_of(value, config.padding_key, config.name)
            return ids.mask_of(ids.in_order(value, config.name, reduces), config.padding_key, reduces)

        return _map_up_to(self.feature_configs, mask_of, inputs)

    def get_tables(self) -> dict[str, Table]:
        """Returns `{name: Table}`."""
        return {config.name: table for config, table in zip(self._structure.tables, self._core.tables, strict=True)}

    def get_embedding_tables(self) -> dict[str, Any]:
        """Returns `{name: (keys, rows)}` for dynamic tables and `{name: rows}` for static ones.

        Keys are `(n,)` int64. Rows are `(n, dim)` float32, or `(vocabulary_size, dim)` of a static table.
        """
        tables: dict[str, Any] = {}
        for name, table in self.get_tables().items():
            if table.vocabulary_size is None:
                contents = table.export()
                tables[name] = (contents.keys, contents.rows)
            else:
                tables[name] = table.find(np.arange(table.vocabulary_size))[0]
        return tables

    def set_embedding_tables(self, tables: dict) -> None:
        """Replaces all rows of the named tables. Optimizer states are reset. If it raises, no table has changed.

        Args:
            tables: Rows by name, as `get_embedding_tables` returns them.

        Raises:
            TypeError: If keys are not integers.
            ValueError: If names or shapes are not those of the tables.
            TableFullError: If there are more rows than `max_capacity`, and `check_mode` is `"raise"`.
        """
        set_tables(self.get_tables(), tables)

    def compute_output_shape(self, input_shape: Any) -> Any:
        def shape_of(config: FeatureConfig, shape: Any) -> Any:
            return ids.rows_shape(shape, config.table.embedding_dim, config.table.combiner is not None)

        return _map_up_to(self.feature_configs, shape_of, input_shape)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None, scores: Any = None
    ) -> Any:
        def spec_of(config: FeatureConfig, value: Any, score: Any = None) -> Any:
            reduces = config.table.combiner is not None
            value = preprocessing.ids_of(value, config.padding_key, config.name)
            ids.check_dtype(value, config.name)
            ids.check_scores(score, config.name, config.table.eviction)
            shape = ids.shape_of(value)
            _check_shape("input_shape", config.input_shape, shape, config.name)
            shape = ids.rows_shape(shape, config.table.embedding_dim, reduces)
            _check_shape("output_shape", config.output_shape, shape, config.name)
            return ids.spec_like(value, shape, self.compute_dtype, reduces)

        trees = (inputs,) if scores is None else (inputs, scores)
        return _map_up_to(self.feature_configs, spec_of, *trees)

    def get_config(self) -> dict[str, Any]:
        # Tables and their optimizers in lists of their own, features by number: so sharing survives.
        structure = self._structure
        numbers = structure.table_numbers

        def feature_of(config: FeatureConfig) -> dict[str, Any]:
            fields = {k: getattr(config, k) for k in ("name", "input_shape", "output_shape", "padding_key")}
            return {"feature": fields, "table": numbers[id(config.table)]}

        seeds = [table_seed(config, seed) for config, seed in zip(structure.tables, self._core.seeds(), strict=True)]
        optimizers = self._core.table_optimizers
        places = {id(optimizer): place for place, optimizer in enumerate(optimizers)}
        tables = [
            dict(table.get_config(), seed=seed, optimizer=places.get(id(table.optimizer)))
            for table, seed in zip(structure.tables, seeds, strict=True)
        ]
        return {
            **super().get_config(),
            "feature_configs": _map_up_to(self.feature_configs, feature_of),
            "tables": tables,
            "table_optimizers": [optimizer_config(optimizer) for optimizer in optimizers],
            "table_stacking": self.table_stacking,
            "update_stats": self.update_stats,
            "save_rows": self.save_rows,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DistributedEmbedding":
        config = dict(config)
        optimizers = [get_optimizer(optimizer) for optimizer in config.pop("table_optimizers")]

        def table_of(table: dict[str, Any]) -> TableConfig:
            place = table["optimizer"]
            return TableConfig.from_config(dict(table, optimizer=None if place is None else optimizers[place]))

        tables = [table_of(table) for table in config.pop("tables")]

        def revive(part: Any) -> Any:
            if isinstance(part, dict) and set(part) == {"feature", "table"}:
                return FeatureConfig(table=tables[part["table"]], **part["feature"])
            if isinstance(part, dict):
                return {key: revive(value) for key, value in part.items()}
            return type(part)(revive(value) for value in part)

        return cls(revive(config.pop("feature_configs")), **config)


class _Structure:
    """The nesting of a layer's features, kept from Keras, which would wrap lists and dicts."""

    def __init__(self, feature_configs: Any) -> None:
        self.feature_configs = feature_configs
        self.features = _leaves_checked(feature_configs)
        self.tables = list({id(f.table): f.table for f in self.features}.values())
        self.table_numbers = {id(table): number for number, table in enumerate(self.tables)}

    def flatten(self, inputs: Any) -> list:
        leaves: list = []
        _map_up_to(self.feature_configs, lambda _, value: leaves.append(value), inputs)
        return leaves

    def pack(self, leaves: list) -> Any:
        rest = iter(leaves)
        return _map_up_to(self.feature_configs, lambda _: next(rest))


def _leaves_checked(feature_configs: Any) -> list[FeatureConfig]:
    leaves = _leaves(feature_configs)
    if not leaves:
        raise ValueError("`feature_configs` must hold at least one `FeatureConfig`")
    return leaves


def _check_shape(argument: str, wanted: tuple | None, shape: tuple, feature: str) -> None:
    """Batches of another size pass, as with keras-rs."""
    if wanted is None:
        return
    agrees = len(wanted) == len(shape) and all(
        w is None or s is None or w == s for w, s in zip(wanted[1:], shape[1:], strict=True)
    )
    if not agrees:
        raise ValueError(f"`{argument}` of feature {feature!r} is {tuple(wanted)}. Received: shape {tuple(shape)}")
