"""Print for a terminal: nothing steers it but we, and no cell of a table is ever cut.

A narrow terminal gets a block of lines for each row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from agent.common.redaction import shown

_GAP = 2  # columns between two cells
_PROSE = 24  # columns that a cell of prose takes at least, if it has that many


class ShownConsole(Console):
    """A console whose text goes through `shown`; styles, and the movements of a progress bar, do not."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def tabulate(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    prose: Collection[str] = (),
    right: Collection[str] = (),
) -> RenderableType:
    """Return a table, or blocks if `width` columns cannot hold it.

    Args:
        heads: A head may have several lines.
        prose: The heads whose cells may be wrapped.
        right: The heads whose cells are aligned to the right.
    """
    cells = [[cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, head.splitlines())) for head in heads]
    for row in cells:
        widths = [max(width, cell.cell_len) for width, cell in zip(widths, row, strict=True)]
    least = (min(size, _PROSE) if head in prose else size for head, size in zip(heads, widths, strict=True))
    if sum(least) + _GAP * (len(heads) - 1) > width:
        return Group(*(_block(heads, row) for row in cells))
    table = Table(box=None, pad_edge=False)
    for head in heads:
        is_prose = head in prose
        justify = "right" if head in right else "left"
        table.add_column(head, justify=justify, no_wrap=not is_prose, overflow="fold")  # type: ignore[arg-type]  # a literal
    for row in cells:
        table.add_row(*row)
    return table


def _block(heads: Sequence[str], row: Sequence[Text]) -> RenderableType:
    """Return a row as its first cell, and below it the others that are not empty, each with its head."""
    named = zip((head.replace("\n", " ") for head in heads[1:]), row[1:], strict=True)
    facts = [Text.assemble((f"{head} ", "dim"), cell) for head, cell in named if cell]
    first = row[0].copy()
    first.stylize("bold")
    return Group(first, Padding(Text("; ").join(facts), (0, 0, 0, 2)))
