"""Statistics of tables in the logs of Keras."""

from typing import Any

import keras

from sok_keras import checkpoint
from sok_keras.callbacks.frequency import check_frequency
from sok_keras.profile import Profile


class TableStatistics(keras.callbacks.Callback):
    """Adds statistics of the model's tables to Keras' logs.

    Callbacks that come after it in the list see them: `CSVLogger`, `TensorBoard`; so do `History` and the line that `fit` prints. By
    default these are totals over all tables: `rows`, `table_bytes`, and since the last update `new_rows`, `refused_rows` and
    `unknown_ids`. The latter are the ids that had no row in validation. If a table has an admission policy, there is `filtered_rows`, too;
    if one has an eviction policy, `evicted_rows`; if one has a time to live, `expired_rows`.

    For each table there are `<name>/size`, `<name>/bytes`, `<name>/occupancy` (size over `max_capacity`, or over the capacity of the
    index), and since the last update `<name>/hits`, `<name>/inserted`, `<name>/filtered`, `<name>/evicted`, `<name>/expired`, `<name>/refused`, `<name>/unknown`. They go to the logs with
    `per_table=True`, and to TensorBoard alone with `log_dir`.

    In `evaluate` and `predict`, callbacks that come after it see `unknown_ids` of the whole call when it ends.

    Example:

    >>> callback = sok.callbacks.TableStatistics(update_freq=100)

    Args:
        update_freq: `"epoch"`, or a number of batches. Updates within an epoch do not wait for training steps.
        per_table: Whether the logs have the numbers of each table.
        log_dir: Directory for TensorBoard, where the numbers of each table are written after each epoch. As
            `keras.callbacks.TensorBoard`, it needs TensorFlow. None: they are not written.
        profile: Whether the logs of an epoch have the ms of each part of a step, as `<part>_ms`; see `sok_keras.Profile`.

    Raises:
        ValueError: If `update_freq` has another value.
    """

    def __init__(
        self,
        update_freq: str | int = "epoch",
        *,
        per_table: bool = False,
        log_dir: checkpoint.Path | None = None,
        profile: bool = False,
    ) -> None:
        super().__init__()
        check_frequency("update_freq", update_freq)
        self.update_freq = update_freq
        self.per_table = per_table
        self.profile = profile
        self._board = None if log_dir is None else keras.callbacks.TensorBoard(str(log_dir), write_graph=False)
        self._profile: Profile | None = None
        self._batches = 0
        self._before: dict[str, dict[str, Any]] = {}
        self._unknown = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._board is not None:
            self._board.set_model(self.model)
            self._board.on_train_begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_profile()
        if self.profile:
            self._profile = Profile(self.model)
            self._profile.__enter__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if isinstance(self.update_freq, int) and self._batches % self.update_freq == 0 and logs is not None:
            totals, by_table = self._numbers("batch", wait=False)
            logs.update(totals | by_table if self.per_table else totals)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        totals, by_table = self._numbers("epoch", wait=True)
        if logs is not None:
            logs.update(totals | by_table if self.per_table else totals)
            logs.update(self._end_profile())
        if self._board is not None:
            self._board.on_epoch_end(epoch, by_table)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._end_profile()
        if self._board is not None:
            self._board.on_train_end()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._unknown = self._unknown_ids()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["unknown_ids"] = self._unknown_ids() - self._unknown

    on_predict_begin = on_test_begin
    on_predict_end = on_test_end

    def _unknown_ids(self):
        return sum(table.stats().unknown_ids for table in checkpoint._tables_of(self.model))

    def _end_profile(self):
        """Ends the measurement of an epoch. Returns ms of each part of a step."""
        if self._profile is None:
            return {}
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        return {f"{name}_ms": 1e3 * part.seconds / part.runs for name, part in profile.parts.items()}

    def _numbers(self, when, wait):
        """Totals of all tables, and the numbers of each."""
        totals = dict.fromkeys(("rows", "table_bytes", "new_rows", "refused_rows", "unknown_ids"), 0)
        numbers, before = {}, self._before.setdefault(when, {})
        for table in checkpoint._tables_of(self.model):
            now, last = table.stats(wait=wait), before.get(table.name)
            since = {
                name: getattr(now, name) - (getattr(last, name) if last else 0)
                for name in ("hits", "inserted", "filtered", "evicted", "expired", "refused", "unknown_ids")
            }
            since["unknown"] = since.pop("unknown_ids")
            before[table.name] = now
            numbers[f"{table.name}/size"] = now.size
            numbers[f"{table.name}/occupancy"] = now.size / (table._max_capacity or now.capacity)
            numbers[f"{table.name}/bytes"] = now.bytes
            numbers |= {f"{table.name}/{name}": count for name, count in since.items()}
            totals["rows"] += now.size
            totals["table_bytes"] += now.bytes
            totals["new_rows"] += since["inserted"]
            totals["refused_rows"] += since["refused"]
            totals["unknown_ids"] += since["unknown"]
            for policy, name in (("admission", "filtered"), ("eviction", "evicted"), ("time_to_live", "expired")):
                if table._core.configs[table._number][policy] is not None:
                    totals[f"{name}_rows"] = totals.get(f"{name}_rows", 0) + since[name]
        return totals, numbers
