"""Tables, and the small things that stand in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.report.figures import NOTHING, budget_share
from mha_deploy.report.markup import Html, tag


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a cell.

    Args:
        content: Text or markup.
        order: What the column is sorted by, where that is not the text.
        numeric: Whether it is a number, set flush right.
        span: How many columns it takes.
    """

    content: object
    order: float | None = None
    numeric: bool = False
    span: int = 1


Row = Sequence[Cell | Html | str]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that belong together, under a heading if they have one."""

    rows: Sequence[Row]
    title: str | Html | None = None


def number(value: float | None, words: str) -> Cell:
    """A number as it is shown, sorted by what it is."""
    return Cell(content=words, order=value, numeric=True)


def data_table(caption: str, columns: Sequence[str], groups: Sequence[Group], *, css: str = "") -> Html:
    """A table that scrolls inside its container.

    Args:
        caption: What it shows.
        columns: The headings; one that starts with `#` is over numbers.
        groups: The rows.
        css: Further classes.
    """
    head = tag("thead", tag("tr", *(_heading(name) for name in columns)))
    bodies = [_body(group, len(columns)) for group in groups]
    table = tag("table", tag("caption", caption), head, *bodies, class_=css or None)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _heading(name: str) -> Html:
    return tag("th", name.removeprefix("#"), scope="col", class_="n" if name.startswith("#") else None)


def _body(group: Group, width: int) -> Html:
    title = tag("tr", tag("th", group.title, colspan=width, scope="rowgroup"), class_="group")
    return tag("tbody", title if group.title else None, *(_row(row) for row in group.rows))


def _row(row: Row) -> Html:
    return tag("tr", *(_cell(cell) for cell in row))


def _cell(cell: Cell | Html | str) -> Html:
    if not isinstance(cell, Cell):
        return tag("td", cell)
    order = None if cell.order is None else f"{cell.order:.6g}"
    return tag(
        "td",
        cell.content,
        class_="n" if cell.numeric else None,
        data_v=order,
        colspan=cell.span if cell.span > 1 else None,
    )


def status(words: str, level: str) -> Html:
    """A word with a sign beside it, so that colour is not needed: `good`, `bad`, `doubt` or `none`."""
    return tag("span", words, class_=f"status {level}")


def passed(value: bool) -> Html:
    """The verdict of one row."""
    return status("passed", "good") if value else status("FAILED", "bad")


def share_bar(share: float | None, *, failed: bool = False) -> Cell:
    """A share of the budget with a bar as long as the share; full and marked from one budget on."""
    if share is None:
        words = "no number" if failed else NOTHING
        return Cell(content=words, order=float("1e300") if failed else None, numeric=True)
    over = share > 1
    style = f"--w:{min(share, 1.0) * 100:.1f}%"
    bar = tag("span", class_=f"share{' over' if over else ''}", style=style, aria_hidden="true")
    words = tag("span", budget_share(share), class_="share-text")
    return Cell(content=tag("span", bar, words, class_="share-cell"), order=share, numeric=True)


def code(words: str) -> Html:
    """A name from a program; it may be broken anywhere."""
    return tag("code", words)


def facts(pairs: Sequence[tuple[str, object]], *, css: str = "facts") -> Html:
    """Names and what they are."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs]
    return tag("dl", *items, class_=css)


def section(name: str, title: str, *children: object) -> Html:
    """A section with a heading that can be linked to."""
    return tag(
        "section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title"
    )


def sentence(words: str, *, css: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", words, class_=css)
