"""The tables of a layer."""

import glob
import importlib.util
import json
import warnings

import numpy as np

from sok_keras import backend, distributed
from sok_keras.backend import native
from sok_keras.plan import Plan
from sok_keras.rows_file import load, same_states, save, states_of
from sok_keras.table import Table
from sok_keras.table_optimizers import core_update
from sok_keras.trigger import Trigger


def _library_paths(name):
    """Returns the paths of a library of NVIDIA's in Python packages, newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted((path for folder in folders for path in glob.glob(f"{folder}/*/lib/{name}")), reverse=True)


class Core:
    """The tables of one layer. It is not a Keras object, so frameworks neither track nor copy it.

    Args:
        configs: A dict for each table, from `table_core_config`.
        storage: `"auto"`, `"hbm"` or `"host"`.
        table_optimizers: The optimizers of tables that have one of their own. The optimizer with number n is the first of them if n is 1.

    Raises:
        DeviceError: For `"hbm"` without a GPU or without NVRTC.
    """

    def __init__(self, configs, storage="auto", table_optimizers=()):
        backend.keep_freed_memory()
        self.table_optimizers = list(table_optimizers)
        self.configs = configs
        self.dims = [config["dim"] for config in configs]
        gpu = None if storage == "host" else backend.gpu(required=storage == "hbm")
        if storage == "hbm" and gpu is None:
            raise native.DeviceError(
                f'`storage="hbm"` needs a GPU that the model runs on, but {backend.name} computes on the CPU here. Install its GPU '
                'build and a driver, or use `storage="host"` or "auto"'
            )
        placements = [config.pop("placement") for config in configs]
        if distributed.is_initialized():
            self._share_seeds(configs)
        self.group = native.Group(
            [json.dumps(config) for config in configs],
            gpu,
            _library_paths("libnvrtc.so.*"),
            _library_paths("libnccl.so.*"),
            [json.dumps(place) for place in placements],
        )
        if storage == "hbm" and not self.group.is_on_gpu:
            raise native.DeviceError(
                "Ranks share tables on GPUs only if each rank has one, and these reach each other's memory or can use NCCL. "
                'Received: storage="hbm". Use "auto" or "host"'
            )
        # Number of the GPU that the tables are on; None: they are on the host.
        self.gpu = gpu if self.group.is_on_gpu else None
        self.trigger = Trigger(self.names)
        # Kept alive here: under JAX a step may still run when the user drops the optimizer.
        self.optimizer = None
        # Names of the tables that no step may change, beside others that are trained.
        self.frozen = []
        self._plans = {}
        # Most floats in the rows of a traced call so far, counting equal ids; None if a call did not tell.
        self.most_floats = 0
        self.tables = [Table(self, number, config) for number, config in enumerate(configs)]

    @staticmethod
    def _share_seeds(configs):
        """Gives the tables the seeds that rank 0 drew."""
        seeds = distributed.broadcast(np.array([config["seed"] for config in configs], "uint64"))
        for config, seed in zip(configs, seeds.tolist(), strict=True):
            config["seed"] = seed

    def native_table(self, number):
        return native.Table(self.group, number)

    def seeds(self):
        """Of the first values of each table's rows: of the rows that came last, where others did."""
        return [table._native.seed for table in self.tables]

    @backend.constant
    def plan(self, features, row_dtype="float32"):
        """Returns the plan of a call with these features. Equal calls share one.

        `row_dtype`: dtype of the rows and of their gradients, `"float32"`, `"bfloat16"` or `"float16"`. Those of float16 that are not finite make
        the ticket NaN, so that a loss scale notices the overflow.
        """
        key = (*features, row_dtype)
        if key not in self._plans:
            self._plans[key] = Plan(self, list(features), row_dtype)
        return self._plans[key]

    def note_traced_call(self, plan, inputs):
        """Notes how many rows a call looks up, for updates that are traced after it. `inputs`: a tuple of tensors for each feature."""
        num_floats = plan.num_floats(inputs)
        if self.most_floats is not None:
            self.most_floats = None if num_floats is None else max(self.most_floats, num_floats)

    def synchronize(self):
        """Waits for the steps that were started, and raises their errors."""
        self.wait_for_steps()
        self.trigger.check()
        self.warn_of_refused()

    def wait_for_steps(self):
        """Waits for the steps that were started. Raises their error by its own class, even if the framework has wrapped it."""
        failure = backend.wait(self.trigger.value)
        if failure is not None:
            # The step returned no trigger. The tables are as they were before it, so training can go on after this error.
            self.trigger.reset()
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

    def names(self):
        return ", ".join(repr(table.name) for table in self.tables)

    # ---- optimizer states

    def update_of(self, table, update):
        """Returns the update of a table as JSON: that of its own optimizer, or `update`, that of the model's."""
        number = self.configs[table._number]["optimizer"]
        return core_update(self.table_optimizers[number - 1]) if number else update

    def warn_of_lost_states(self, update):
        """Warns if states that were loaded, and that no optimizer was bound to yet, do not fit this update (JSON) or that of a table's own
        optimizer."""
        if self.group.is_bound():
            return
        rules = [
            (table, table._native.update_rule, self.update_of(table, update))
            for table in self.tables
            if len(table._native)
        ]
        lost = [
            f"{table.name!r}: {states_of(rule, table.dim)[0]}, now {states_of(its, 1)[0]}"
            for table, rule, its in rules
            if states_of(rule, table.dim)[1] and not same_states(rule, its, table.dim)
        ]
        if lost:
            warnings.warn(
                f"Rows were loaded with states of another optimizer than the one that now trains the tables ({', '.join(lost)}): the rows "
                "stay, and states start anew.",
                stacklevel=4,
            )

    def copy_from(self, other):
        """Copies the rows and states of another layer's tables."""
        store = {}
        save(other, store)
        load(self, store)
