"""Policies of tables whose rows come and go."""

import dataclasses
import datetime
import re
from typing import Any

import keras
import numpy as np

from sok_keras import _native as native
from sok_keras.flags import check_flags

__all__ = ["LFU", "LRU", "Custom", "Frequency", "Probability", "TimeToLive", "set_clock"]


@dataclasses.dataclass(frozen=True)
class _Policy:
    """Base of all policies. The fields of a policy are its configuration."""

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    def _take_integers(self, *names: str) -> None:
        """Makes Python's integers of NumPy's, so that a configuration is JSON."""
        for name in names:
            object.__setattr__(self, name, as_python_int(getattr(self, name)))


def _check_half_life(half_life: Any) -> None:
    if half_life is not None and not _is_count(half_life):
        raise ValueError(
            f"`half_life` must be a positive integer of 64 bits or None. Received: half_life={half_life!r}"
        )


def _bytes_of(memory: Any) -> Any:
    """The number of bytes that a string with a unit says; any other value as it is."""
    said = re.fullmatch(r"(\d+) ?([KMG])B", memory) if isinstance(memory, str) else None
    return int(said[1]) << {"K": 10, "M": 20, "G": 30}[said[2]] if said else memory


def as_python_int(value: Any) -> Any:
    """Returns an integer of NumPy as one of Python, and anything else as it is. To NumPy a span of time is an integer, too."""
    return int(value) if isinstance(value, np.integer) and not isinstance(value, np.timedelta64) else value


def _is_count(value: Any) -> bool:
    """Whether a value is an integer from 1 to 2^64 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eviction(_Policy):
    """Base of the eviction policies.

    Args:
        count_inference: Whether lookups outside of training use rows, too.
        keep_evicted: Whether the table keeps the rows that it removes until `Table.take_evicted` takes them.
    """

    count_inference: bool = False
    keep_evicted: bool = False

    def __post_init__(self) -> None:
        check_flags(count_inference=self.count_inference, keep_evicted=self.keep_evicted)

    def _core_score(self) -> Any:
        """Returns what the score of a row counts, as the core names it."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LRU(Eviction):
    """Eviction of the least recently used rows.

    A table at `max_capacity` removes the rows with the lowest scores to make room for new ones. The score of a row is the step in which
    it was last used. A step is a call of the optimizer, counted from 1; a lookup of training uses a row when the optimizer applies the
    step. Of equal scores the lowest keys go first, as unsigned integers. Rows that were looked up for training stay until their
    gradients are applied.

    At a time, the larger number of the rows that are needed and a 64th of `max_capacity` go. If too few can go, `check_mode` says what
    happens.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(8, max_capacity=2, eviction=sok.policies.LRU(keep_evicted=True))
    >>> table = layer.get_table()
    >>> rows, outcomes = table.find_or_insert([1, 2])
    >>> rows, outcomes = table.find_or_insert([3])
    >>> outcomes.evicted, table.keys().tolist(), table.take_evicted().keys.tolist()
    (1, [2, 3], [1])

    Args:
        count_inference: Whether lookups outside of training use rows, too.
        keep_evicted: Whether the table keeps the rows that it removes until `Table.take_evicted` takes them.
    """

    def _core_score(self) -> Any:
        return "lru"


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LFU(Eviction):
    """Eviction of the least frequently used rows.

    As `LRU`, but the score of a row is the number of ids that have used it: an id that comes three times in a batch counts three times.

    Args:
        half_life: Number of steps after which all scores are halved and rounded down, so that rows which are no longer used can go.
            None: never.
        count_inference: As in `LRU`.
        keep_evicted: As in `LRU`.
    """

    half_life: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_integers("half_life")
        _check_half_life(self.half_life)

    def _core_score(self) -> Any:
        return {"lfu": {"half_life": self.half_life}}


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(Eviction):
    """Eviction of the rows with the lowest scores of the caller's own: times, prices, priorities.

    As `LRU`, but the score of a row is the highest that came with its id in the last step that brought it one. Layers take scores beside
    ids, `layer(ids, scores=scores)`: int32 or int64 in the shape of the ids. A negative score counts as 0. A row without a score has 0,
    and a call without scores leaves them as they are.

    Example:

    >>> layer = sok.DynamicEmbedding(8, max_capacity=2, eviction=sok.policies.Custom())
    >>> ids, scores = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    >>> model = keras.Model([ids, scores], keras.layers.Dense(1)(layer(ids, scores=scores)))
    >>> model.compile(sok.OptimizerWrapper("sgd"), "mse")
    >>> loss = model.train_on_batch([np.array([1, 2], "int32"), np.array([9, 5], "int32")], np.zeros(2))
    >>> loss = model.train_on_batch([np.array([3], "int32"), np.array([7], "int32")], np.zeros(1))
    >>> contents = layer.get_table().export(scores=True)
    >>> contents.keys.tolist(), contents.scores.tolist()
    ([1, 3], [9, 7])

    Args:
        count_inference: Whether lookups outside of training set scores, too.
        keep_evicted: As in `LRU`.
    """

    def _core_score(self) -> Any:
        return "custom"


@dataclasses.dataclass(frozen=True)
class Admission(_Policy):
    """Base of the admission policies."""


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True)
class Frequency(Admission):
    """Admission of the ids that have come often enough.

    An id gets its row in the step in which it has come for the `threshold`-th time; its row learns from that step already. Until then a
    lookup answers what `missing` says, and the gradient of the id is dropped. Sights are counted when the optimizer applies a step, so a
    step that a loss scale skips counts none. `Table.assign` and `Table.find_or_insert` insert every key.

    The counts of ids without a row take 27 to 40 bytes each, on a GPU some 50. An id whose row is erased, evicted or expired starts anew. Dumps
    hold the counts, so counting goes on after a load; weights files do not.

    With `memory` there are at most `n = memory // 64` counts after each step. If a step ends with more, those of 1 are forgotten, then those
    of 2 and so on, until a 64th of `n` is free. So an id may get its row late, but never early. If more than `n` ids come equally often, some
    may never get one. Each time that its count is forgotten, an id loses at most `1.02 * s / n` sights, where `s` is the sum of all counts.
    Ids that come again soon keep their counts among many that come once. A table keeps the memory that its largest step has needed, and on a
    GPU up to three times `memory`.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(8, admission=sok.policies.Frequency(2))
    >>> ids = keras.Input((), dtype="int32")
    >>> model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    >>> model.compile(sok.OptimizerWrapper("sgd"), "mse")
    >>> loss = model.train_on_batch(np.array([1, 1, 2], "int32"), np.zeros(3))
    >>> layer.get_table().keys().tolist(), layer.get_table().explain(2)
    ([1], Explanation(state='filtered', score=None, step=None, sights=1))

    Args:
        threshold: Number of sights from which on an id gets a row.
        once_per_step: Whether an id counts once a step, however often it comes in it.
        half_life: Number of steps after which all counts are halved and rounded down. None: never.
        memory: Number of bytes for the counts, at least 64, or a string with a unit of 1024 bytes or its powers: `"64MB"`. Ranks share
            them. `threshold` is at most 4095 then. None: each id without a row has a count.
    """

    threshold: int
    _: dataclasses.KW_ONLY
    once_per_step: bool = False
    half_life: int | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        given = self.memory
        object.__setattr__(self, "memory", _bytes_of(given))
        self._take_integers("threshold", "half_life", "memory")
        if not _is_count(self.threshold) or self.threshold >= 2**32:
            raise ValueError(
                f"`threshold` must be an int from 1 to {2**32 - 1}. Received: threshold={self.threshold!r}"
            )
        check_flags(once_per_step=self.once_per_step)
        _check_half_life(self.half_life)
        memory: Any = self.memory
        if memory is None:
            return
        if not _is_count(memory) or memory < 64:
            raise ValueError(
                f"`memory` must be an int from 64 bytes to {2**64 - 1}, a string of an int and KB, MB or GB, or None. Received: memory={given!r}"
            )
        if self.threshold > 4095:
            raise ValueError(
                f"`threshold` must be at most 4095 where `memory` is given. Received: threshold={self.threshold!r}"
            )


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True)
class Probability(Admission):
    """Admission by chance: an id without a row gets one with this probability in each step in which it comes.

    The draw is a function of the seed of the table, the id and the step, so that each run admits the same ids. Nothing is counted. All
    else is as in `Frequency`.

    Args:
        probability: A number from 0 to 1.
    """

    probability: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.probability, int | float | np.integer | np.floating) and not isinstance(
            self.probability, bool | np.timedelta64
        )
        if not (is_number and 0 <= self.probability <= 1):
            raise ValueError(f"`probability` must be a float from 0 to 1. Received: probability={self.probability!r}")
        object.__setattr__(self, "probability", float(self.probability))


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True)
class TimeToLive(_Policy):
    """How long a row stays after the last step that has trained it.

    A row that training has not used for so long goes at the end of a step, with its optimizer states. A step is a call of the optimizer; a
    row that is inserted outside of steps is as old as the last one. Rows whose gradients were not applied yet stay, and so does the row of
    `out_of_vocabulary_key`. Each step looks at a part of the keys: all parts have their turn within a quarter of `time_to_live` if that is a
    number of steps, but at most in 4096 steps, and in 4096 steps if it is a time. Until then the row answers. The fewer parts there are, the
    longer a step takes. A table whose `TableConfig` has `trainable=False` keeps its rows.

    Times are those of the system's clock, and exact to a 500th of `time_to_live`. A clock that is set back removes nothing. Dumps and
    weights files hold the ages of rows.

    Example:

    >>> import datetime
    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(8, time_to_live=datetime.timedelta(days=30))
    >>> layer = sok.DynamicEmbedding(8, time_to_live=10_000)
    >>> layer.time_to_live
    TimeToLive(time_to_live=10000, keep_expired=False)

    Args:
        time_to_live: A `datetime.timedelta` in whole milliseconds, of which there is at least one, or a number of steps.
        keep_expired: Whether the table keeps the rows that it removes until `Table.take_evicted` takes them.
    """

    time_to_live: datetime.timedelta | int
    _: dataclasses.KW_ONLY
    keep_expired: bool = False

    def __post_init__(self) -> None:
        self._take_integers("time_to_live")
        time = self.time_to_live
        if not (_is_count(time) or (isinstance(time, datetime.timedelta) and time >= _MILLISECOND)):
            raise ValueError(
                "`time_to_live` must be a positive number of steps of 64 bits or a `datetime.timedelta` of at least a millisecond. Received: "
                f"time_to_live={time!r}"
            )
        check_flags(keep_expired=self.keep_expired)
        if isinstance(time, datetime.timedelta):
            object.__setattr__(self, "time_to_live", time - time % _MILLISECOND)

    def get_config(self) -> dict[str, Any]:
        time: Any = self.time_to_live
        if isinstance(time, datetime.timedelta):
            time = {"milliseconds": time // _MILLISECOND}
        return {"time_to_live": time, "keep_expired": self.keep_expired}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TimeToLive":
        time = config["time_to_live"]
        if isinstance(time, dict):
            config = {**config, "time_to_live": datetime.timedelta(**time)}
        return cls(**config)


def set_clock(now: datetime.datetime | None) -> None:
    """Stops the clock by which rows of this process expire. It is meant for tests.

    Args:
        now: The time at which it stands, with a time zone. None: it follows the clock of the system again.

    Raises:
        TypeError: If it is no `datetime`.
        ValueError: If it is before 1970, or without a time zone.
    """
    if now is None:
        native.set_clock(None)
        return
    if not isinstance(now, datetime.datetime):
        raise TypeError(f"`now` must be a `datetime` with a time zone or None. Received: now={now!r}")
    since = None if now.tzinfo is None else now - datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
    if since is None or since < datetime.timedelta(0):
        raise ValueError(f"`now` must have a time zone and not be before 1970. Received: now={now!r}")
    native.set_clock(since // _MILLISECOND)


_MILLISECOND = datetime.timedelta(milliseconds=1)
_BY_NAME = {"lru": LRU, "lfu": LFU}


def get_eviction(identifier: Any) -> Eviction | None:
    """Returns the policy that an argument `eviction` names.

    Args:
        identifier: `"lru"`, `"lfu"`, a policy, what `keras.saving.serialize_keras_object` made of one, or None.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(identifier, str) and identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    known = '"lru", "lfu", `sok_keras.policies.LRU(...)`, `LFU(...)`, `Custom(...)`'
    return _get("eviction", identifier, LRU | LFU | Custom, known)


def get_admission(identifier: Any) -> Admission | None:
    """Returns the policy that an argument `admission` names.

    Args:
        identifier: A policy, what `keras.saving.serialize_keras_object` made of one, or None.

    Raises:
        ValueError: If it is none of these.
    """
    known = "`sok_keras.policies.Frequency(...)`, `Probability(...)`"
    return _get("admission", identifier, Frequency | Probability, known)


def get_time_to_live(identifier: Any) -> TimeToLive | None:
    """Returns the policy that an argument `time_to_live` names.

    Args:
        identifier: A number of steps, a `datetime.timedelta`, a policy, what `keras.saving.serialize_keras_object` made of one, or None.

    Raises:
        ValueError: If it is none of these.
    """
    if identifier is not None and not isinstance(identifier, dict | TimeToLive):
        return TimeToLive(identifier)
    return _get("time_to_live", identifier, TimeToLive, "`sok_keras.policies.TimeToLive(...)`")


def _get(argument: str, identifier: Any, kinds: Any, known: str) -> Any:
    """Returns a policy of one of these kinds, or None."""
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is None or isinstance(identifier, kinds):
        return identifier
    raise ValueError(f"`{argument}` must be {known} or None. Received: {argument}={identifier!r}")


def check_is_dynamic(argument: str, policy: Any, vocabulary_size: int | None) -> None:
    """Raises a `ValueError` if a policy is given for a static table."""
    if policy is not None and vocabulary_size is not None:
        raise ValueError(
            f"`{argument}` is for dynamic tables, since a static table has room for all of its ids. Received: "
            f"vocabulary_size={vocabulary_size!r}"
        )


def check_eviction(eviction: Eviction | None, max_capacity: int | None) -> None:
    """Raises a `ValueError` unless a table with this capacity can have the policy."""
    if eviction is not None and max_capacity is None:
        raise ValueError("`eviction` needs `max_capacity`, the number of rows to keep. Received: max_capacity=None")


def core_time_to_live(time_to_live: TimeToLive | None) -> dict[str, Any] | None:
    """Converts a policy for the core."""
    if time_to_live is None:
        return None
    time = time_to_live.get_config()["time_to_live"]
    lifetime = time if isinstance(time, dict) else {"steps": time}
    return {"lifetime": lifetime, "keeps_expired": time_to_live.keep_expired}


def core_admission(admission: Admission | None) -> Any:
    """Converts a policy for the core, whose policies have the same names and fields."""
    return None if admission is None else {type(admission).__name__.lower(): admission.get_config()}


def core_eviction(eviction: Eviction | None) -> dict[str, Any] | None:
    """Converts a policy for the core."""
    if eviction is None:
        return None
    return {
        "score": eviction._core_score(),
        "counts_inference": eviction.count_inference,
        "keeps_evicted": eviction.keep_evicted,
    }
