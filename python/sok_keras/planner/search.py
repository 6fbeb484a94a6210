"""The search for the options that make the slowest rank fastest."""

import dataclasses

import numpy as np

# An exact search is for so many tables, and examines so many assignments.
_MOST_TABLES, _MOST_EXAMINED = 32, 20_000
_PASSES = 16
# Tables of an exact search for any assignment that fits, at most: each is a call in a call.
_DEEPEST = 700


@dataclasses.dataclass(frozen=True)
class Problem:
    """Options of tables as arrays.

    Args:
        times: By table, `(options, ranks)` float64: seconds.
        sizes: By table, `(options, memories)` float64: bytes of the ranks' devices, then of the hosts.
        budgets: `(memories,)` float64: bytes that there are.
        are_alike: Whether ranks may change places: all are on one host, the last memory, and have the same options in every table.
    """

    times: list[np.ndarray]
    sizes: list[np.ndarray]
    budgets: np.ndarray
    are_alike: bool = False

    def sums(self, choice: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times of ranks and the bytes of memories."""
        times = sum(times[option] for times, option in zip(self.times, choice, strict=True))
        return times, sum(sizes[option] for sizes, option in zip(self.sizes, choice, strict=True))

    def missing(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the bytes that are missing: in one memory, or in each of many along the last axis."""
        # Sums in another order may differ in the last bits.
        return np.where(sizes > self.budgets + 1, sizes - self.budgets, 0.0)


def _heuristic(problem: Problem) -> list[int]:
    """Starts with the fastest option of each table. While memory is missing, it moves the table with the shortest additional time for each
    byte of that. Then it changes single tables while the slowest rank becomes faster.
    """
    choice = [int(times.max(axis=1).argmin()) for times in problem.times]
    times, sizes = problem.sums(choice)
    while problem.missing(sizes).any():
        best = None
        for table, option in enumerate(choice):
            of_table, of_sizes = problem.times[table], problem.sizes[table]
            saved = problem.missing(sizes).sum() - problem.missing(sizes + of_sizes - of_sizes[option]).sum(axis=1)
            slower = (times + of_table - of_table[option]).max(axis=1) - times.max()
            ratio = np.where(saved > 0, np.maximum(slower, 1e-12) / np.maximum(saved, 1e-9), np.inf)
            if ratio.min() < np.inf and (best is None or ratio.min() < best[0]):
                best = ratio.min(), table, int(ratio.argmin())
        if best is None:
            return choice
        _, table, option = best
        times, sizes = _changed(problem, choice, times, sizes, table, option)
    order = sorted(range(len(choice)), key=lambda table: -problem.times[table].max())
    for _ in range(_PASSES):
        before = times.max(), times.sum()
        for table in order:
            of_table, of_sizes, option = problem.times[table], problem.sizes[table], choice[table]
            all_times = times + of_table - of_table[option]
            fits = ~problem.missing(sizes + of_sizes - of_sizes[option]).any(axis=1)
            # A rank that is not the slowest also counts, a little.
            score = np.where(fits, all_times.max(axis=1) + 1e-6 * all_times.sum(axis=1), np.inf)
            best_option = int(score.argmin())
            if score[best_option] < score[option] * (1 - 1e-12):
                times, sizes = _changed(problem, choice, times, sizes, table, best_option)
        if (times.max(), times.sum()) >= before:
            break
    return choice


def _changed(
    problem: Problem, choice: list[int], times: np.ndarray, sizes: np.ndarray, table: int, option: int
) -> tuple[np.ndarray, np.ndarray]:
    """Changes the option of a table. Returns the sums then."""
    before, choice[table] = choice[table], option
    of_table, of_sizes = problem.times[table], problem.sizes[table]
    return times + of_table[option] - of_table[before], sizes + of_sizes[option] - of_sizes[before]


class _Exact:
    """Examines all assignments that may be better than the best one so far. `order`: the numbers of tables as they are assigned."""

    def __init__(self, problem: Problem, choice: list[int], order: list[int]) -> None:
        self.problem, self.choice, self.order = problem, list(choice), order
        times, sizes = problem.sums(choice)
        self.best = np.inf if problem.missing(sizes).any() else times.max()
        self.examined = 0
        # The shortest sum over ranks, and the smallest memories, that the tables from a place on can have.
        self.rest = _sums_from([problem.times[table].sum(axis=1).min() for table in order])
        self.least = _sums_from([problem.sizes[table].min(axis=0) for table in order])

    def search(self) -> bool:
        """Returns whether all were examined."""
        ranks = self.problem.times[0].shape[1]
        return self._visit(0, np.zeros(ranks), np.zeros(len(self.problem.budgets)), [0] * len(self.order))

    def _visit(self, place: int, times: np.ndarray, sizes: np.ndarray, chosen: list[int]) -> bool:
        if place == len(self.order):
            self.best, self.choice = times.max(), list(chosen)
            return True
        table = self.order[place]
        of_table, of_sizes = self.problem.times[table], self.problem.sizes[table]
        all_times, all_sizes = times + of_table, sizes + of_sizes
        bound = np.maximum(all_times.max(axis=1), (all_times.sum(axis=1) + self.rest[place + 1]) / len(times))
        fits = np.asarray(~self.problem.missing(all_sizes + self.least[place + 1]).any(axis=1))
        seen = set()
        for option in np.argsort(all_times.max(axis=1), kind="stable"):
            if not fits[option] or bound[option] >= self.best * (1 - 1e-12):
                continue
            if place == 0 and self.problem.are_alike:
                # As long as no table is assigned, ranks may change places. They share the host.
                ranks = sorted(zip(of_table[option], of_sizes[option][:-1], strict=True))
                alike = (*ranks, of_sizes[option][-1])
                if alike in seen:
                    continue
                seen.add(alike)
            self.examined += 1
            if self.examined > _MOST_EXAMINED:
                return False
            chosen[table] = int(option)
            if not self._visit(place + 1, all_times[option], all_sizes[option], chosen):
                return False
        return True


def _sums_from(values: list) -> np.ndarray:
    """Returns the sums of the values from each place on, and 0 at the end."""
    array = np.array(values)
    return np.concatenate([np.cumsum(array[::-1], axis=0)[::-1], np.zeros((1, *array.shape[1:]))])


def search(problem: Problem) -> tuple[list[int], bool]:
    """Returns the number of an option for each table, and whether it is known that no others are better.

    If memory is missing with the returned ones and it is known, then it is missing with all.
    """
    choice = _heuristic(problem)
    tables = range(len(choice))
    exact = _Exact(problem, choice, sorted(tables, key=lambda table: -problem.times[table].max()))
    if exact.best <= exact.rest[0] / problem.times[0].shape[1] * (1 + 1e-12):
        return choice, True
    if exact.best < np.inf:
        is_exact = len(choice) <= _MOST_TABLES and exact.search()
        return exact.choice, is_exact
    # The largest tables first: whether the others fit depends on them.
    order = sorted(tables, key=lambda table: -problem.sizes[table].max())
    if len(order) > _DEEPEST:
        return choice, False
    exact = _Exact(problem, choice, order)
    is_exact = exact.search()
    return exact.choice, is_exact
