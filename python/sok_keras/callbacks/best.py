"""The best value of a metric."""

import warnings

import keras
import numpy as np


class Best:
    """Says whether a metric improves, as `keras.callbacks.EarlyStopping` does."""

    def __init__(self, monitor, mode):
        self.monitor = monitor
        # It compares and never stops.
        self._judge = keras.callbacks.EarlyStopping(monitor, mode=mode, patience=2**31)
        self._calls = 0

    def begin(self, model):
        """Forgets the best value. `model`: whose metrics say which direction is better."""
        self._judge.set_model(model)
        self._judge.on_train_begin()
        self._calls = 0

    @property
    def value(self):
        """The best value until now, a float; None if there is none."""
        best = self._judge.best
        return None if best is None or not np.isfinite(best) else float(best)

    @value.setter
    def value(self, value):
        if value is not None:
            self._judge.best = value

    def improves(self, logs):
        """Whether the metric is better than all before. Without the metric, warns and returns False."""
        if self.monitor not in logs:
            warnings.warn(
                f"No dump is written: `save_best_only` needs the metric {self.monitor!r}, and the logs have {sorted(logs)}.",
                stacklevel=4,
            )
            return False
        self._calls += 1
        self._judge.on_epoch_end(self._calls, logs)
        return self._judge.best_epoch == self._calls
