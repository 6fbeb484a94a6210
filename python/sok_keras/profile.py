"""The times of the parts of training steps."""

from typing import NamedTuple

import keras

from sok_keras.checkpoint import layers_of
from sok_keras.errors import SokError


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

    >>> layer = sok.DynamicEmbedding(8)
    >>> with sok.Profile(layer) as profile:  # or of a model, around its `fit`
    ...     rows = layer(np.array([[3, 5]], "int32"), training=True)
    >>> profile.parts["find"].runs
    1

    `print(profile)` shows the parts as a table:

        part      runs   ms a run
        find        20      0.412
        update      20      0.630

    Args:
        model: A Keras model, or a layer with tables.

    Attributes:
        parts: After the `with` block, a dict from each part that has run to its `runs` and `seconds`, the sums over all layers.

    Raises:
        ValueError: If there are no tables.
        SokError: At the start of the block, if another profile measures a layer of the model.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        layers = layers_of(model) if isinstance(model, keras.layers.Layer) else []
        if not layers:
            raise ValueError(f"`model` must be a model or a layer with tables. Received: {model!r}")
        self._cores = [layer._core for layer in layers]
        self.parts: dict[str, PartTime] = {}

    def __enter__(self) -> "Profile":
        for core in self._cores:
            core.synchronize()
        if any(core.group.is_measured() for core in self._cores):
            raise SokError(
                "Another `Profile` measures tables of this model. Two cannot measure the same tables at a time"
            )
        for core in self._cores:
            core.group.measure(True)
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        try:
            self._read()
        except Exception:
            if error_type is None:
                raise
        finally:
            for core in self._cores:
                core.group.measure(False)

    def _read(self) -> None:
        total: dict[str, PartTime] = {}
        for core in self._cores:
            core.wait_for_steps()
            for name, runs, seconds in core.group.take_profile():
                before = total.get(name, PartTime(0, 0.0))
                total[name] = PartTime(before.runs + runs, before.seconds + seconds)
        self.parts = {name: part for name, part in total.items() if part.runs}

    def __str__(self) -> str:
        rows = [f"{name:8}{part.runs:6}{1e3 * part.seconds / part.runs:11.3f}" for name, part in self.parts.items()]
        return "\n".join(["part      runs   ms a run", *rows])
