"""`areal-core estimators`: the table in the terminal, the page and the picture in a folder."""

from __future__ import annotations

from pathlib import Path

from areal_core.estimators.page import COLUMNS, is_unbiased, render_page, table_note, table_rows
from areal_core.estimators.survey import Survey, take_survey
from areal_core.telemetry.jsonl import replace_file

PAGE_FILE = "estimators.html"
PICTURE_FILE = "estimators.png"


def estimators_command(output: str | Path, group_size: int) -> int:
    """Print the table of estimators, then write the page and the picture into `output` and print where they are.

    Raises:
        ValueError: group_size out of range.
        MissingPackageError: matplotlib is not installed; the table is printed all the same.
    """
    from areal_core.estimators.figure import save_png

    survey = take_survey(group_size)
    print_table(survey)
    page = render_page(survey)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / PAGE_FILE, page.encode())
    save_png(survey, folder / PICTURE_FILE)
    print(f"page: {folder / PAGE_FILE}")
    print(f"picture: {folder / PICTURE_FILE}")
    return 0


def print_table(survey: Survey) -> None:
    """Print the table, with a note on what its columns mean."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(COLUMNS):
        heading = f"{column.name}\n{column.unit}" if column.unit else column.name
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row, cells in zip(survey.rows, table_rows(survey), strict=True):
        table.add_row(*cells, style="bold" if is_unbiased(row) else None)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(table_note(survey), style="dim")
