"""Functions for writing the results of scripts as Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table that ends with a newline.

    Args:
        columns: the names of the columns, separated by " | ".
        rows: the cells of each row. A "|" in a cell is replaced by "/", because this character would start a new cell.
    """
    names = columns.split(" | ")
    lines = [names, ["---"] * len(names), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |\n" for cells in lines)
