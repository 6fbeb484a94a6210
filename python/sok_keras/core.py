"""The tables of a layer, and the plans of its calls."""

import glob
import importlib.util
import json
import os
import warnings

import numpy as np

from sok_keras import backend
from sok_keras.backend import native
from sok_keras.backend.handles import plans
from sok_keras.rows_file import load, same_states, save, states_of
from sok_keras.table import Table


def _nvrtc_paths():
    """Returns the paths of NVRTC in Python packages, newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted((path for folder in folders for path in glob.glob(f"{folder}/*/lib/libnvrtc.so.*")), reverse=True)


class Plan:
    """Describes the tensors of a layer's calls: features, tables, forms of ids. It is made when a call is traced."""

    def __init__(self, core, features, check_finite):
        self._native = native.Plan(core.group, features, check_finite)
        # For each feature: its axis, its table's dim, and the places of its ids and row splits among all tensors.
        self._places, start = [], 0
        for _, table, words, axis, weights, *_ in features:
            end = start + 1 + words + (axis == "ragged")
            self._places.append((axis, core.dims[table], start, end - 1))
            start = end + weights
        self.num_features = len(features)
        self.gpu = core.gpu
        self.handle = self._native.handle
        plans[self.handle] = self

    def shapes_of(self, tensors):
        """Shape of each feature's rows. `tensors`: for each feature its ids, then its row splits and its weights if it has them."""
        return [_rows_shape(axis, dim, tensors[ids], tensors[splits]) for axis, dim, ids, splits in self._places]

    def output_shapes(self, inputs):
        """Static shape of each feature's rows. Unknown axes are None."""
        pairs = zip(self._places, inputs, strict=True)
        return [_rows_shape(axis, dim, tensors[0], tensors[-1]) for (axis, dim, _, _), tensors in pairs]


def _rows_shape(axis, dim, ids, splits):
    if axis == "ragged":
        (length,) = splits.shape
        return (None if length is None else length - 1, dim)
    return (*(ids.shape[:-1] if axis == "last" else ids.shape), dim)


class Core:
    """The tables of one layer. It is not a Keras object, so frameworks neither track nor copy it.

    Args:
        configs: A dict for each table, from `table_core_config`.
        storage: `"auto"`, `"hbm"` or `"host"`.

    Raises:
        DeviceError: For `"hbm"` without a GPU or without NVRTC.
    """

    def __init__(self, configs, storage="auto"):
        backend.keep_freed_memory()
        self.configs = configs
        self.dims = [config["dim"] for config in configs]
        gpu = None if storage == "host" else backend.gpu(asked=storage == "hbm")
        if storage == "hbm" and gpu is None:
            raise native.DeviceError(
                f'`storage="hbm"` needs a GPU that the model runs on, but {backend.name} computes on the CPU here. Install its GPU '
                'build and a driver, or use `storage="host"` or "auto"'
            )
        self.group = native.Group([json.dumps(config) for config in configs], gpu, _nvrtc_paths())
        # Number of the GPU that the tables are on; None: they are on the host.
        self.gpu = gpu if self.group.is_on_gpu else None
        self.trigger = None
        # A random number in the trigger, which every step copies. A trigger without it belongs to other tables.
        self._mark = np.float32(0.5 + int.from_bytes(os.urandom(3), "little") / 2**25)
        self._weights_are_strange, self._unseen = False, None
        # Kept alive here: under JAX a step may still run when the user drops the optimizer.
        self.optimizer = None
        self._plans = {}
        self.tables = [Table(self, number, config) for number, config in enumerate(configs)]

    def native_table(self, number):
        return native.Table(self.group, number)

    def seeds(self):
        """Of the first values of each table's rows: of the rows that came last, where others did."""
        return [table._native.seed for table in self.tables]

    @backend.constant
    def plan(self, features, check_finite=False):
        """Returns the plan of a call with these features. Equal calls share one.

        `check_finite`: whether gradients that are not finite make the ticket NaN, so that a loss scale notices the overflow.
        """
        key = (*features, check_finite)
        if key not in self._plans:
            self._plans[key] = Plan(self, list(features), check_finite)
        return self._plans[key]

    def synchronize(self):
        """Waits for the steps that were started, and raises their errors."""
        self.wait_for_steps()
        self.check_weights()
        self.warn_of_refused()

    def wait_for_steps(self):
        """Waits for the steps that were started. Raises their error by its own class, even if the framework has wrapped it."""
        failure = backend.wait(None if self.trigger is None else self.trigger._value)
        if failure is not None:
            # The step returned no trigger. The tables are as they were before it, so training can go on after this error.
            self._assign(self.first_trigger())
        try:
            self.group.raise_latched()
        except Exception as error:
            raise error from failure
        if failure is not None:
            raise failure

    def warn_of_refused(self):
        for name, refused in self.group.take_refused():
            warnings.warn(
                f"Table {name!r} is full: it refused {refused} of the new keys. Raise `max_capacity`, or set "
                '`check_mode="count"` to hear no more of it.',
                stacklevel=4,
            )

    # ---- the trigger as a weight

    def first_trigger(self, shape=(64, 2), dtype="float32"):
        """Zeros, except for the mark in the last place. Steps are counted in the first."""
        value = np.zeros(shape, dtype)
        value[-1, -1] = self._mark
        return value

    def watch(self, trigger):
        """Watches what Keras sets the trigger to, since rows are not Keras weights and would not come along."""
        self.trigger, self._assign = trigger, trigger.assign

        def assign(value):
            given = backend.at_hand(value)
            self._unseen = value if given is None else None
            self._look_at(given, isinstance(value, np.ndarray))
            return self._assign(value)

        trigger.assign = assign

    def advance(self, trigger):
        """Sets the trigger to the value that a step returned."""
        self._assign(trigger)

    def _look_at(self, given, may_be_old=False):
        if given is None or given.shape != self.trigger.shape:
            return
        self._weights_are_strange = given[-1, -1] != self._mark
        looks = may_be_old and not self._weights_are_strange
        now = backend.at_hand(self.trigger._value, fetches=True) if looks else None
        if now is not None and given[0, 0] < now[0, 0]:
            warnings.warn(
                f"Weights of an earlier step were set, but the rows of {self.names()} are no Keras weights and stay as they are. To "
                "go back to an earlier step use `sok_keras.callbacks.DumpCheckpoint` or a weights file.",
                stacklevel=4,
            )

    def _look_at_unseen(self):
        """Checks a value that was not at hand when the trigger was set to it: not computed yet, or on another device."""
        if self._unseen is not None:
            unseen, self._unseen = self._unseen, None
            self._look_at(backend.at_hand(unseen, fetches=True))

    def keep_rows(self):
        """Accepts the present rows as those of the present weights."""
        self._look_at_unseen()
        if self._weights_are_strange:
            self._weights_are_strange = False
            self._assign(self.first_trigger())

    def check_weights(self):
        """Raises a `SokError`, once, if the trigger of other tables was set without their rows."""
        self._look_at_unseen()
        if self._weights_are_strange:
            self.keep_rows()
            raise native.SokError(
                f"The weights of other tables were set, without their rows: those of {self.names()} are as they were. Rows are no "
                "Keras weights. They come with `keras.models.load_model`, also of an Orbax checkpoint that was not written with "
                "`save_weights_only=True`; with `load_weights` of a `.weights.h5` file; with `sok_keras.load`; and with `copy.deepcopy`"
            )

    def names(self):
        return ", ".join(repr(table.name) for table in self.tables)

    # ---- optimizer states

    def warn_of_lost_states(self, update):
        """Warns if states that were loaded, and that no optimizer was bound to yet, do not fit this update (JSON)."""
        if self.group.is_bound():
            return
        rules = [(table, table._native.update_rule) for table in self.tables if len(table._native)]
        lost = [
            f"{table.name!r}: {states_of(rule, table.dim)[0]}"
            for table, rule in rules
            if states_of(rule, table.dim)[1] and not same_states(rule, update, table.dim)
        ]
        if lost:
            warnings.warn(
                f"Rows were loaded with states of another optimizer than {states_of(update, 1)[0]}, which now trains the tables "
                f"({', '.join(lost)}): the rows stay, and states start anew.",
                stacklevel=4,
            )

    def copy_from(self, other):
        """Copies the rows and states of another layer's tables."""
        store = {}
        save(other, store)
        load(self, store)
