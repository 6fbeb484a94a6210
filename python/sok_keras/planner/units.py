"""Numbers of reports."""


def bytes_text(number: float) -> str:
    """Returns a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} TiB"


def time_text(seconds: float) -> str:
    """Returns a time in milliseconds."""
    return f"{1e3 * seconds:.3f} ms"


def table_text(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table of text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
