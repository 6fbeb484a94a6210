"""Two builds in turn, on one machine: any commands that print Markdown tables, as all benches do.

    python benches/turns.py --turns 9 "python OLD/benches/step.py" "python benches/step.py"
    ./turns.py --turns 9 "old/find; old/step" "new/find; new/step"          # beside packed GPU benches

A line for each number of each row: the median over the turns of the first command and of the second, their ratio, and their ranges.
Numbers that never differ are left out: they are no measurements.
"""

import argparse
import statistics
import subprocess


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs=2, metavar="COMMAND")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    found = [{}, {}]
    for turn in range(arguments.turns):
        # Who goes first has the cooler machine, so they change places.
        for build in (0, 1) if turn % 2 == 0 else (1, 0):
            for name, number in numbers_of(output_of(arguments.commands[build])):
                found[build].setdefault(name, []).append(number)
        show(turn + 1, *found)


def output_of(command):
    return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout


def numbers_of(text):
    """Yields `(row and column, number)` of all tables."""
    title, columns, seen = "", None, {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells
        elif not set(cells[0]) <= set("-: "):
            label = ", ".join(cell for cell in cells if number(cell) is None and not is_range(cell))
            for column, cell in zip(columns, cells, strict=False):
                if number(cell) is not None:
                    name = f"{title}: {label}: {column}"
                    seen[name] = seen.get(name, 0) + 1
                    yield name if seen[name] == 1 else f"{name} {seen[name]}", number(cell)


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


def is_range(cell):
    return cell.count("-") == 1 and all(number(part) is not None for part in cell.split("-"))


def show(turns, old, new):
    """Prints the table after `turns` turns."""
    print(f"\n{turns} turns\n\n| what | old | new | new / old | old, range | new, range |\n|---|---|---|---|---|---|")
    for name in old:
        before, after = old[name], new.get(name, [])
        if after and len({*before, *after}) > 1:
            medians = statistics.median(before), statistics.median(after)
            ranges = [f"{min(values):g}-{max(values):g}" for values in (before, after)]
            ratio = f"{medians[1] / medians[0]:.3f}" if medians[0] else "-"
            print(f"| {name} | {medians[0]:g} | {medians[1]:g} | {ratio} | {' | '.join(ranges)} |", flush=True)


if __name__ == "__main__":
    main()
