"""The trigger of a layer: the variable that orders its calls, and that Keras saves and sets as one of the weights."""

import os
import warnings

import numpy as np

from sok_keras import backend
from sok_keras.backend import native
from sok_keras.backend.private_keras import value_of


class Trigger:
    """Watches what Keras sets the variable to, since rows are not Keras weights and would not come along.

    Args:
        names: A function that returns the names of the layer's tables, for messages.
    """

    def __init__(self, names):
        self._names = names
        self.variable = None
        # A random number in the trigger, which every step copies. A trigger without it belongs to other tables.
        self.mark = np.float32(0.5 + int.from_bytes(os.urandom(3), "little") / 2**25)
        self._is_strange, self._unseen = False, None
        # Whether the variable is being set to what a step made of its own value.
        self.is_own = False

    def first_value(self, shape=(64, 2), dtype="float32"):
        """Zeros, except for the mark in the last place. Steps are counted in the first."""
        value = np.zeros(shape, dtype)
        value[-1, -1] = self.mark
        return value

    @property
    def value(self):
        """The framework's tensor, or None before there is a variable."""
        return None if self.variable is None else value_of(self.variable)

    def watch(self, variable):
        """Watches the assignments of a variable from now on."""
        self.variable, self._assign = variable, variable.assign

        def assign(value):
            # A look at a value on a GPU costs a copy.
            given = None if self.is_own else backend.at_hand(value)
            self._unseen = value if given is None and not self.is_own else None
            self.look_at(given, isinstance(value, np.ndarray))
            return self._assign(value)

        variable.assign = assign

    def advance(self, value):
        """Sets the variable to the value that a step returned."""
        self._assign(value)

    def reset(self):
        """Sets the variable to its first value."""
        self._assign(self.first_value())

    def keep_rows(self):
        """Accepts the present rows as those of the present weights."""
        self._look_at_unseen()
        if self._is_strange:
            self._is_strange = False
            self.reset()

    def check(self):
        """Raises a `SokError`, once, if the trigger of other tables was set without their rows."""
        self._look_at_unseen()
        if self._is_strange:
            self.keep_rows()
            raise native.SokError(
                f"The weights of other tables were set, without their rows: those of {self._names()} are as they were. Rows are no "
                "Keras weights. They come with `keras.models.load_model`, also of an Orbax checkpoint that was not written with "
                "`save_weights_only=True`; with `load_weights` of a `.weights.h5` file; with `sok_keras.load`; and with `copy.deepcopy`"
            )

    def look_at(self, given, may_be_old=False):
        """Looks at a value that the variable gets: whose it is, and whether it is of an earlier step."""
        if given is None or given.shape != self.variable.shape:
            return
        self._is_strange = given[-1, -1] != self.mark
        looks = may_be_old and not self._is_strange
        now = backend.at_hand(self.value, fetches=True) if looks else None
        if now is not None and given[0, 0] < now[0, 0]:
            warnings.warn(
                f"Weights of an earlier step were set, but the rows of {self._names()} are no Keras weights and stay as they are. To "
                "go back to an earlier step use `sok_keras.callbacks.DumpCheckpoint` or a weights file.",
                stacklevel=4,
            )

    def _look_at_unseen(self):
        """Checks a value that was not at hand when the variable was set to it: not computed yet, or on another device."""
        if self._unseen is not None:
            unseen, self._unseen = self._unseen, None
            self.look_at(backend.at_hand(unseen, fetches=True))
