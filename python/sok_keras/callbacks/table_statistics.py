"""Statistics of tables in the logs of Keras."""

from typing import Any

import keras

from sok_keras import checkpoint


class TableStatistics(keras.callbacks.Callback):
    """Adds statistics of the model's tables to Keras' logs.

    Callbacks that come after it in the list see them: `CSVLogger`, `TensorBoard`; so does `History`. For each table these are
    `<name>/size`, `<name>/bytes`, `<name>/occupancy` (size over `max_capacity`, or over the capacity of the index), and
    `<name>/hits`, `<name>/inserted`, `<name>/refused`, which count since the last update.

    Example:

    >>> callback = sok.callbacks.TableStatistics(update_freq=100)

    Args:
        update_freq: `"epoch"`, or a number of batches. Updates within an epoch do not wait for training steps.

    Raises:
        ValueError: If `update_freq` has another value.
    """

    def __init__(self, update_freq: str | int = "epoch") -> None:
        super().__init__()
        if update_freq != "epoch" and not (isinstance(update_freq, int) and update_freq > 0):
            raise ValueError(
                f'`update_freq` must be "epoch" or a positive number of batches. Received: update_freq={update_freq!r}'
            )
        self.update_freq = update_freq
        self._batches = 0
        self._before: dict[str, dict[str, Any]] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if isinstance(self.update_freq, int) and self._batches % self.update_freq == 0 and logs is not None:
            logs.update(self._numbers("batch", wait=False))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._numbers("epoch", wait=True))

    def _numbers(self, when, wait):
        numbers, before = {}, self._before.setdefault(when, {})
        for table in checkpoint._tables_of(self.model):
            now = table.stats(wait=wait)
            numbers[f"{table.name}/size"] = now.size
            numbers[f"{table.name}/occupancy"] = now.size / (table._max_capacity or now.capacity)
            numbers[f"{table.name}/bytes"] = now.bytes
            last = before.get(table.name)
            for name in ("hits", "inserted", "refused"):
                numbers[f"{table.name}/{name}"] = getattr(now, name) - (getattr(last, name) if last else 0)
            before[table.name] = now
        return numbers
