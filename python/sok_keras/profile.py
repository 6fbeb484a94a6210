"""The times of the parts of training steps."""

from typing import NamedTuple

import keras

from sok_keras.checkpoint import layers_of


class PartTime(NamedTuple):
    """How often a part of a step has run, and the seconds of all runs: of the host's clock, or of the GPU's."""

    runs: int
    seconds: float


class Profile:
    """Measures what the tables of a model do, part by part.

    The parts are `find`, `pool`, `sort`, `merge`, `insert`, `norm` and `update`. On the CPU one pass does `find`, `pool` and `sort`,
    whose time is that of `find`. Gradients that need not be merged before, as those of most models, are merged in `update`. On a GPU
    `sort` runs beside `pool`, and keys that are inserted at the commit are a `find` of their own. Steps are somewhat slower while they
    are measured.

    Example:

    >>> with sok.Profile(model) as profile:
    ...     history = model.fit(x, y, verbose=0)
    >>> print(profile)  # doctest: +SKIP
    part     runs   ms a run
    find       20      0.412
    update     20      0.630

    Args:
        model: A Keras model, or a layer with tables.

    Attributes:
        parts: After the `with` block, a dict from each part that has run to its `runs` and `seconds`, the sums over all layers.

    Raises:
        ValueError: If there are no tables.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._cores = [layer._core for layer in layers_of(model)]
        if not self._cores:
            raise ValueError(f"`model` must have layers with tables. Received: {model!r}")
        self.parts: dict[str, PartTime] = {}

    def __enter__(self) -> "Profile":
        for core in self._cores:
            core.synchronize()
            core.group.measure(True)
        return self

    def __exit__(self, *_: object) -> None:
        total: dict[str, PartTime] = {}
        for core in self._cores:
            core.wait_for_steps()
            for name, runs, seconds in core.group.take_profile():
                before = total.get(name, PartTime(0, 0.0))
                total[name] = PartTime(before.runs + runs, before.seconds + seconds)
            core.group.measure(False)
        self.parts = {name: part for name, part in total.items() if part.runs}

    def __str__(self) -> str:
        rows = [f"{name:8}{part.runs:6}{1e3 * part.seconds / part.runs:11.3f}" for name, part in self.parts.items()]
        return "\n".join(["part      runs   ms a run", *rows])
