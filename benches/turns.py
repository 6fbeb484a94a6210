"""Two builds in turn, on one machine: any commands that print Markdown tables, as all benches do.

    python benches/turns.py --turns 9 "python OLD/benches/step.py" "python benches/step.py"
    ./turns.py --turns 9 "old/find; old/step" "new/find; new/step"          # beside packed GPU benches

A line for each number of each row: the median over the turns of the first command and of the second, their ratio, and their ranges.
Numbers that never differ are left out: they are no measurements.

With --live each command is started once, since a framework takes longer to start than to measure. The commands measure in turn, as often
as they wait in `turns`. This works for gpu_bridge.py and gpu_fit.py with --turns, and on a CPU for benches that use `work.in_turns`.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys

END_OF_TURN = "end of turn"


def turns(count):
    """Yields the numbers of `count` turns. In a live command, each turn waits until the other command has ended its own."""
    for number in range(count):
        if is_live():
            print(END_OF_TURN, flush=True)
            if not sys.stdin.readline():
                sys.exit("turns.py has ended")
        yield number


def is_live():
    return "SOK_LIVE" in os.environ


def print_columns(columns):
    """Starts the table of a turn. A command that is not live has one table over all turns, which its caller starts."""
    if is_live():
        print(f"| {' | '.join(columns)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs=2, metavar="COMMAND")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--live", action="store_true", help="start each command once; it decides how many turns it takes"
    )
    arguments = parser.parse_args()
    outputs = outputs_of_live(arguments.commands) if arguments.live else outputs_of(arguments.commands, arguments.turns)
    found = [{}, {}]
    for turn, of_turn in enumerate(outputs, 1):
        for of_build, text in zip(found, of_turn, strict=True):
            for name, number in numbers_of(text):
                of_build.setdefault(name, []).append(number)
        show(turn, *found)


def outputs_of(commands, count):
    """Yields what the two commands print in each turn."""
    for turn in range(count):
        outputs = [None, None]
        for build in order(turn):
            outputs[build] = subprocess.run(
                commands[build], shell=True, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        yield outputs


def outputs_of_live(commands):
    """Yields what the two commands print in each turn, until they end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | {"SOK_LIVE": "1"}}
    processes = [subprocess.Popen(command, shell=True, **pipes) for command in commands]
    for process in processes:
        to_end_of_turn(process)
    turn = 0
    while any(process.poll() is None for process in processes):
        outputs = ["", ""]
        for build in order(turn):
            with contextlib.suppress(BrokenPipeError):
                print(file=processes[build].stdin, flush=True)
            outputs[build] = to_end_of_turn(processes[build])
        yield outputs
        turn += 1


def to_end_of_turn(process):
    """Returns what a process prints until it has ended its turn, or has ended."""
    lines = []
    for line in process.stdout:
        if line.strip() == END_OF_TURN:
            return "".join(lines)
        lines.append(line)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return "".join(lines)


def order(turn):
    """Returns which command goes first in a turn, and which second. They alternate, because the first finds the machine cooler."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


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
