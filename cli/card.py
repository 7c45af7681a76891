"""`spec card`, and the card that other verbs leave beside a drafter they wrote."""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption

EXAMPLE = "Example: `spec card runs/a/draft --report runs/a/report/report.json`"


def card(
    directory: Annotated[Path, typer.Argument(help="Drafter directory, of any layout.")],
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", "-r", help="A report.json of this drafter; may be repeated."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", help="Licence id, as the hub lists them: apache-2.0, mit, ..."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; the drafter's README.md.")
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the card and write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a card that was written or changed by hand.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a drafter's model card from its files and its reports.

    What the files do not say is called not recorded. --json prints the metadata.
    """
    from ..export.card import card_path, make_card, write_card

    if only_print:
        made = make_card(directory, reports=report or [], license=license, out=out)
    else:
        made = write_card(directory, reports=report or [], license=license, out=out, force=force)
    if as_json:
        print(json.dumps(made.metadata, indent=2))
    elif only_print:
        print(made.text, end="")
    else:
        print(f"wrote {card_path(directory, out)}")


def leave_card(directory: Path, *, of: Path | None = None) -> None:
    """Write the card of a drafter that a verb has just made; a hand-written one stays, with a note.

    The drafter is there already, so a card that cannot be made is a warning and no error. `of` is
    the drafter it was made from, whose card may state a licence.
    """
    from ..export.card import CARD, is_ours, stated_license, write_card

    path = directory / CARD
    if path.exists() and not is_ours(path):
        print(f"{path} was written or changed by hand and stays as it is", file=sys.stderr)
        return
    try:
        write_card(directory, license=None if of is None else stated_license(of / CARD))
    except (ValueError, OSError) as error:
        warnings.warn(f"no card: {error}; spec card {directory} then writes it", stacklevel=2)
