"""Reads Criteo click logs, and makes files of their shape with a signal in them.

A Criteo line is a label, 13 integers and 26 hexadecimal ids, separated by tabs; an empty field is a missing one.
The real logs may not be passed on, so `make` writes a file that behaves like them: ids of very unequal frequency,
millions of possible ones in some columns, fields missing, and a click probability that hangs on ids, on pairs of
ids and on the integers. As that probability is known, so is the AUC that no model can beat.

    python examples/criteo.py make data/criteo.tsv --rows 500000 --seed 0
    python examples/criteo.py make data/day_3.tsv --day 3 --drift 0.1    # new ids have replaced some each day

    dense, categorical, label = criteo.read("data/criteo.tsv")
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

NUM_DENSE = 13
NUM_CATEGORICAL = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_CATEGORICAL
MISSING_ID = -1  # 15 hexadecimal digits at most are read, so no id of a file is negative
MAX_HEX_DIGITS = 15
MAX_DECIMAL_DIGITS = 18  # all that surely fit an int64
HELD_OUT_SHARE = 5  # one row in five, the last ones of the file


def read(path):
    """Returns a Criteo file as three arrays.

    Args:
        path: the file; any number of rows, 40 fields each.

    Returns:
        dense: float32 `(num_rows, 13)`, log(1 + value); negative values count as 0, so do missing ones.
        categorical: int64 `(num_rows, 26)`, ids >= 0; `MISSING_ID` (-1) where the field is empty.
        label: float32 `(num_rows,)`, 0 or 1.

    Raises:
        ValueError: a line has not 40 fields, or a field holds a character that does not belong there.
    """
    parts = [_parse(block) for block in _blocks_of_lines(path)]
    if not parts:
        raise ValueError(f"a Criteo file must have at least one line: {path} is empty")
    dense, categorical, label = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return dense, categorical, label


def num_train_rows(num_rows):
    """Returns how many rows, from the first one, are for training; the rest is held out."""
    return num_rows - num_rows // HELD_OUT_SHARE


def auc(labels, scores):
    """Returns the area under the ROC curve, exact; equal scores get the mean of their ranks.

    Args:
        labels: `(num_rows,)`, positive where > 0.
        scores: `(num_rows,)`, any real numbers.
    """
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(places[np.asarray(labels) > 0], minlength=len(counts))
    return _auc_of_counts(positives, counts - positives)


def make(path, num_rows, seed=0, chunk_rows=1 << 16, day=0, drift=0.0):
    """Writes a file of Criteo's shape and returns its facts, which also go to `path` + ".json".

    Each number is a function of seed, day, column and row alone, so the file does not depend on `chunk_rows`, and
    memory does not depend on `num_rows`.

    Args:
        day: the number of the day, from 0 on. Each day has other rows.
        drift: the share of the ids of a column that new ids replace from one day to the next.

    Returns:
        dict: rows, seed, positives (share of label 1), and the AUC of the true probabilities: best_auc over the
        held-out rows, best_auc_of_all over all rows.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    truth = Truth(seed, day, drift)
    held_out, counts = np.zeros((2, 2, NUM_PROBABILITY_BINS), np.int64)
    num_positives = 0
    with open(unfinished, "wb") as file:
        for start in range(0, num_rows, chunk_rows):
            places = np.arange(start, min(start + chunk_rows, num_rows), dtype=np.uint64)
            rows = places + np.uint64(day * num_rows)
            dense, dense_missing, ranks = truth.fields(rows)
            label, probability = truth.draw_labels(rows, dense, ranks)
            file.write(_lines(label, dense, dense_missing, truth.ids(ranks), ranks == 0))
            num_positives += int(label.sum())
            _count(held_out, places >= num_train_rows(num_rows), label, probability)
            _count(counts, places >= 0, label, probability)
    facts = {"rows": num_rows, "seed": seed, "positives": num_positives / num_rows}
    facts["best_auc"] = float(_auc_of_counts(held_out[1], held_out[0]))
    facts["best_auc_of_all"] = float(_auc_of_counts(counts[1], counts[0]))
    # The file gets its name last: what bears the name is complete.
    Path(f"{path}.json").write_text(json.dumps(facts) + "\n")
    os.replace(unfinished, path)
    return facts


def facts_of(path):
    """Returns what `make` said of the file at `path`; an empty dict for a file that it did not make."""
    beside = Path(f"{path}.json")
    return json.loads(beside.read_text()) if beside.exists() else {}


# ---- reading --------------------------------------------------------------------------------------------------------

_TAB, _NEWLINE, _MINUS = (ord(character) for character in "\t\n-")
_BAD = 255


def _digit_values(digits):
    """Returns uint8 `(256,)`: the value of each character that is one of `digits`, `_BAD` for the others."""
    values = np.full(256, _BAD, np.uint8)
    for character in digits:
        values[ord(character)] = int(character, 16)
    return values


_DECIMAL = _digit_values("0123456789")
_HEXADECIMAL = _digit_values("0123456789abcdefABCDEF")


def _blocks_of_lines(path, block_bytes=1 << 24):
    """Yields uint8 arrays of whole lines, each with its newline; 16 MB keep the temporary arrays small."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            complete, newline, rest_of_block = block.rpartition(b"\n")
            if newline:
                yield np.frombuffer(rest + complete + newline, np.uint8)
                rest = rest_of_block
            else:
                rest += block
    if rest:
        yield np.frombuffer(rest + b"\n", np.uint8)


def _parse(text):
    """Returns dense, categorical and label of whole lines, uint8 `(num_bytes,)`. No loop over rows: only over digits."""
    ends = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    if len(ends) % NUM_FIELDS or np.any((text[ends] == _NEWLINE) != _is_last_field(len(ends))):
        raise ValueError(f"each line must have {NUM_FIELDS} fields, separated by tabs")
    starts = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, NUM_FIELDS)
    ends = ends.reshape(-1, NUM_FIELDS)

    label = _numbers(text, starts[:, :1], ends[:, :1], _DECIMAL, 10, 1)[:, 0].astype(np.float32)
    dense = _dense(text, starts[:, 1 : 1 + NUM_DENSE], ends[:, 1 : 1 + NUM_DENSE])
    starts, ends = starts[:, 1 + NUM_DENSE :], ends[:, 1 + NUM_DENSE :]
    categorical = _numbers(text, starts, ends, _HEXADECIMAL, 16, MAX_HEX_DIGITS)
    return dense, np.where(starts == ends, MISSING_ID, categorical), label


def _is_last_field(num_fields):
    return np.arange(num_fields) % NUM_FIELDS == NUM_FIELDS - 1


def _dense(text, starts, ends):
    """Returns float32 log(1 + value) of integer fields, 0 where it is negative or missing."""
    is_negative = (text[starts] == _MINUS) & (starts < ends)
    values = _numbers(text, starts + is_negative, ends, _DECIMAL, 10, MAX_DECIMAL_DIGITS)
    return np.log1p(np.where(is_negative, 0, values)).astype(np.float32)


def _numbers(text, starts, ends, digit_values, base, max_digits):
    """Returns int64 numbers written in text[start:end], 0 for an empty field; `starts` and `ends` share their shape."""
    num_digits = int((ends - starts).max(initial=0))
    if num_digits > max_digits:
        raise ValueError(f"a number must have at most {max_digits} digits in base {base}: got {num_digits}")
    numbers = np.zeros(starts.shape, np.int64)
    for place in range(num_digits):
        # From the left, so that each number is done when its end is reached, whatever its length.
        positions = starts + place
        is_digit = positions < ends
        digits = digit_values[text[np.minimum(positions, len(text) - 1)]]
        if np.any(is_digit & (digits == _BAD)):
            raise ValueError(f"a field must be a number in base {base}: got character {place + 1} of one that is not")
        numbers = np.where(is_digit, numbers * base + digits, numbers)
    return numbers


# ---- the AUC --------------------------------------------------------------------------------------------------------

NUM_PROBABILITY_BINS = 1 << 20  # of equal width; two probabilities nearer than 1e-6 count as equal


def _auc_of_counts(positives, negatives):
    """Returns the AUC from how many positives and negatives have each score, scores ascending; nan without both."""
    pairs = float(positives.sum()) * float(negatives.sum())
    if not pairs:
        return float("nan")
    negatives_below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (negatives_below + 0.5 * negatives)) / pairs)


def _count(counts, is_counted, label, probability):
    """Adds the rows that `is_counted` chooses to `counts`, int64 `(2, NUM_PROBABILITY_BINS)`, by label and probability."""
    bins = (probability[is_counted] * NUM_PROBABILITY_BINS).astype(np.int64)
    for value in (0, 1):
        counts[value] += np.bincount(bins[label[is_counted] == value], minlength=NUM_PROBABILITY_BINS)


# ---- the truth behind a made file -----------------------------------------------------------------------------------

# Distinct ids of each column in Criteo's Kaggle set, and about the largest integers there.
CARDINALITIES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306,
                 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)  # fmt: skip
LARGEST_DENSE = (5775, 257675, 65535, 969, 9999999, 431037, 56311, 6047, 29019, 46, 231, 4008, 7393)
# Share of empty fields, about as there.
DENSE_MISSING = (0.45, 0, 0.21, 0.21, 0.02, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.21)
CATEGORICAL_MISSING = (0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0, 0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0,
                       0.03, 0.44, 0.44)  # fmt: skip
ZIPF_EXPONENT = 1.4  # the r-th id of a column comes about r**-1.4 times as often as its first
LEARNABLE_RANK = 5  # effects fade from here on: what comes a few times in a file cannot be learned from it
PAIRED_COLUMNS = (2, 8, 9)  # two large ones and a small one; each two of them have an effect together
LATENT_DIM = 2
# Shares of the logit's variance: of the integers, of ids alone, of pairs of ids.
DENSE_SHARE, ID_SHARE, PAIR_SHARE = 0.3, 0.55, 0.15
LOGIT_STD = 1.4  # gives a best AUC near the 0.80 that models reach on Criteo
POSITIVES = 0.27
CALIBRATION_ROWS = 1 << 15


class Truth:
    """What a made file is drawn from: fields by row, and the click probability by fields.

    Nothing is stored by id: an id's effect is a hash of it, so ten million ids cost no memory. An id is known here by
    its rank: 1 for the most frequent one of its column, 0 for a missing one. From one day to the next, some ranks go
    to new ids, with effects of their own; how often that has come to pass is the generation of a rank.
    """

    def __init__(self, seed, day=0, drift=0.0):
        self.seed, self.drift = seed, drift
        self.day = 0  # all days have the scales of the first
        # Whatever the seed drew, each part gets its share of the variance, and the labels their mean. Measured on
        # rows far from those of any file.
        rows = np.arange(CALIBRATION_ROWS, dtype=np.uint64) + np.uint64(1 << 62)
        dense, _, ranks = self.fields(rows)
        parts = self._logit_parts(dense, ranks)
        self.scales = LOGIT_STD * np.sqrt([DENSE_SHARE, ID_SHARE, PAIR_SHARE]) / parts.std(axis=1)
        self.bias = _bias_for(self.scales @ parts, POSITIVES)
        self.day = day

    def fields(self, rows):
        """Returns dense int64 `(num_rows, 13)`, where it is missing (bool, same shape), ranks int64 `(num_rows, 26)`."""
        dense = np.stack([self._dense(column, rows) for column in range(NUM_DENSE)], axis=1)
        dense_missing = self._missing("dense", DENSE_MISSING, rows)
        ranks = np.stack([self._ranks(column, rows) for column in range(NUM_CATEGORICAL)], axis=1)
        ranks[self._missing("categorical", CATEGORICAL_MISSING, rows)] = 0
        # As `read` gives 0 for a missing integer, a model cannot tell the two: neither may the truth.
        dense[dense_missing] = 0
        return dense, dense_missing, ranks

    def ids(self, ranks):
        """Returns uint32 `(num_rows, 26)`: ids without order, as Criteo's are."""
        return np.stack([self._ids(column, ranks[:, column]) for column in range(NUM_CATEGORICAL)], axis=1)

    def draw_labels(self, rows, dense, ranks):
        """Returns labels, bool, and the probabilities that they were drawn by, float64; both `(num_rows,)`."""
        probability = _sigmoid(self.bias + self.scales @ self._logit_parts(dense, ranks))
        return _uniform(self.seed, "label", rows) < probability, probability

    def _dense(self, column, rows):
        """Returns integers, most of them small. Some of column 1 are -1, as there."""
        logarithm = np.log1p(LARGEST_DENSE[column]) * _uniform(self.seed, f"dense {column}", rows) ** 2
        return np.expm1(logarithm).astype(np.int64) - (column == 1)

    def _ranks(self, column, rows):
        """Returns ranks by a Zipf law: the inverse of its (continuous) distribution function at a uniform number."""
        power = 1 - ZIPF_EXPONENT
        top = (CARDINALITIES[column] + 1.0) ** power
        ranks = (1 + _uniform(self.seed, f"id {column}", rows) * (top - 1)) ** (1 / power)
        return np.minimum(ranks.astype(np.int64), CARDINALITIES[column])

    def _missing(self, kind, shares, rows):
        draws = [_uniform(self.seed, f"{kind} missing {column}", rows) for column in range(len(shares))]
        return np.stack(draws, axis=1) < shares

    def _logit_parts(self, dense, ranks):
        """Returns float64 `(3, num_rows)`: what the integers, the ids and the pairs of ids add, before scaling."""
        columns = np.arange(NUM_DENSE, dtype=np.uint64)
        of_dense = np.log1p(np.maximum(dense, 0)) @ (_effect(self.seed, "dense", columns) / np.log1p(LARGEST_DENSE))
        of_ids = sum(self._id_effect("id", column, ranks) for column in range(NUM_CATEGORICAL))
        of_pairs = sum(self._pair_effect(f"pair {place}", ranks) for place in range(LATENT_DIM))
        return np.stack([of_dense, of_ids, of_pairs])

    def _id_effect(self, name, column, ranks):
        """Returns `(num_rows,)`: the effect called `name` of each row's id in `column`."""
        rank = ranks[:, column].astype(np.uint64)
        identity = rank + (self._generations(column, rank) << np.uint64(32))
        return _effect(self.seed, f"{name} {column}", identity) / (1 + rank / LEARNABLE_RANK)

    def _ids(self, column, ranks):
        """Returns uint32 `(num_rows,)`, one to one within a column and a day."""
        ids = _scrambled(ranks.astype(np.uint32) + np.uint32(column << 24))
        generations = self._generations(column, ranks.astype(np.uint64)).astype(np.uint32)
        return np.where(generations == 0, ids, _scrambled(ids + generations * np.uint32(0x9E3779B9)))

    def _generations(self, column, ranks):
        """Returns uint64 `(num_rows,)`: how many ids have had each rank before. "Missing" is no id."""
        generations = np.zeros(len(ranks), np.uint64)
        for day in range(1, self.day + 1):
            generations += (_uniform(self.seed, f"drift {column} to day {day}", ranks) < self.drift) & (ranks > 0)
        return generations

    def _pair_effect(self, name, ranks):
        """Returns `(num_rows,)`: the sum over all pairs of columns of the product of their effects."""
        latent = np.stack([self._id_effect(name, column, ranks) for column in PAIRED_COLUMNS])
        return 0.5 * (latent.sum(axis=0) ** 2 - (latent**2).sum(axis=0))


def _uniform(seed, stream, counters):
    """Returns float64 in [0, 1), `(num_counters,)`: random, yet the same for the same seed, stream and counter.

    References: splitmix64, Steele et al., "Fast splittable pseudorandom number generators", 2014.
    """
    key = np.random.SeedSequence([seed, *stream.encode()]).generate_state(1, np.uint64)
    bits = key + counters * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def _effect(seed, stream, ids):
    """Returns `(num_ids,)`: an effect of mean 0 and variance 1 for each id, the same whenever it comes."""
    return np.sqrt(12) * (_uniform(seed, f"effect of {stream}", ids) - 0.5)


def _sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def _bias_for(logits, mean):
    """Returns what to add to `logits` so that the mean probability is `mean`; by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < mean else (low, middle)
    return low


# ---- writing --------------------------------------------------------------------------------------------------------


def _lines(label, dense, dense_missing, ids, ids_missing):
    """Returns the rows as bytes: every field at its full width first, then without the bytes that are not needed."""
    fields = [_decimal_field(label, 1, np.zeros(len(label), bool))]
    for column, largest in enumerate(LARGEST_DENSE):
        fields.append(_decimal_field(dense[:, column], len(str(largest)), dense_missing[:, column]))
    for column in range(NUM_CATEGORICAL):
        fields.append(_hexadecimal_field(ids[:, column], ids_missing[:, column]))
    fields[-1][:, -1] = _NEWLINE
    text = np.concatenate(fields, axis=1)
    return text[text != 0].tobytes()


def _decimal_field(values, num_digits, missing):
    """Returns uint8 `(num_rows, num_digits + 2)`: sign, digits, tab; 0 for what is not to be written."""
    powers = 10 ** np.arange(num_digits)[::-1]
    magnitudes = np.abs(values.astype(np.int64))[:, None]
    digits = magnitudes // powers % 10 + ord("0")
    is_written = (magnitudes >= powers) | (powers == 1)
    sign = np.where(values < 0, _MINUS, 0)[:, None]
    return _field(np.concatenate([sign, digits * is_written], axis=1), missing)


def _hexadecimal_field(values, missing):
    """Returns uint8 `(num_rows, 9)`: eight digits and a tab."""
    digits = values[:, None] >> np.arange(28, -1, -4, dtype=np.uint32) & np.uint32(15)
    return _field(np.frombuffer(b"0123456789abcdef", np.uint8)[digits], missing)


def _field(characters, missing):
    characters = np.where(missing[:, None], 0, characters)
    return np.pad(characters, ((0, 0), (0, 1)), constant_values=_TAB).astype(np.uint8)


def _scrambled(ids):
    """Returns uint32 ids without order, one to one (murmur3's last step)."""
    ids = (ids ^ (ids >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    ids = (ids ^ (ids >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return ids ^ (ids >> np.uint32(16))


# ---- command line ---------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make_parser = parser.add_subparsers(required=True).add_parser("make", help="write a file of Criteo's shape")
    make_parser.add_argument("path", type=Path)
    make_parser.add_argument("--rows", type=int, default=500_000)
    make_parser.add_argument("--seed", type=int, default=0)
    make_parser.add_argument("--day", type=int, default=0)
    make_parser.add_argument("--drift", type=float, default=0.0, help="share of the ids that are replaced each day")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    facts = make(arguments.path, arguments.rows, arguments.seed, day=arguments.day, drift=arguments.drift)
    print(f"{arguments.path}: {facts['rows']} rows, {facts['positives']:.1%} positive")
    print(f"best possible AUC of the held-out rows: {facts['best_auc']:.4f}")
