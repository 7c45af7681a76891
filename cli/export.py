"""`spec check`, `spec export` and `spec import`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import show
from .card import leave_card
from .options import JsonOption, PairOption

if TYPE_CHECKING:
    from ..export.check import Report

CHECK_EXAMPLE = "Example: `spec check runs/a/draft -t ./model`"
EXPORT_EXAMPLE = "Example: `spec export -d runs/a/draft --to vllm -o ./for-vllm -t Qwen/Qwen3-4B`"
IMPORT_EXAMPLE = "Example: `spec import ./published -o ./drafter --num-target-layers 36`"

LayoutOption = Annotated[
    Literal["sglang", "zlab", "deepspec", "vllm"], typer.Option("--to", help="Layout to write.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Directory to make.")]


def check(
    directory: Annotated[Path, typer.Argument(help="Drafter directory, of any layout.")],
    target: PairOption = None,
    engine: Annotated[
        Literal["sglang", "vllm", "zlab", "deepspec"], typer.Option(help="Who is to load it.")
    ] = "sglang",
    as_json: JsonOption = False,
) -> None:
    """Tell what a drafter directory is, what would go wrong with it and what to do.

    Exit code 1 where something is wrong, 2 where there is no drafter to read.
    """
    from ..export.check import check as run

    report = run(directory, target=target, engine=engine)
    if as_json:
        show.record(report.to_json(), as_json=True)
    else:
        show.record(report.facts, as_json=False)
        print()
        for line in report_lines(report):
            print(line)
    if report.has_defect:
        raise typer.Exit(1)


def export(
    draft: Annotated[Path, typer.Option("--draft", "-d", help="Drafter directory, of any layout.")],
    to: LayoutOption,
    out: OutOption,
    target: PairOption = None,
) -> None:
    """Write a drafter in the layout of an engine or of another toolkit, and read it back."""
    from ..export.convert import export_draft

    report = export_draft(draft, out, to, target=target)
    tell(report, out)
    leave_card(out, of=draft)


def import_(
    directory: Annotated[Path, typer.Argument(help="Drafter directory, of any layout.")],
    out: OutOption,
    target: PairOption = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(help="Decoder layers whose output it reads, from 0, comma-separated."),
    ] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="Its mask token.")] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Input positions of a block, anchor included.")
    ] = None,
    num_target_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the target; --target says it too.")
    ] = None,
) -> None:
    """Turn a drafter of another layout into the native one.

    The options say what its config.json leaves out; nothing is guessed.
    """
    from ..export.checkpoint import Given
    from ..export.convert import import_draft

    given = Given(
        target_layer_ids=None if layer_ids is None else whole_numbers(layer_ids),
        mask_token_id=mask_token_id,
        block_size=block_size,
        num_target_layers=num_target_layers,
    )
    report = import_draft(directory, out, given=given, target=target)
    tell(report, out)
    leave_card(out, of=directory)


def whole_numbers(text: str) -> list[int]:
    """`1,8,15` -> [1, 8, 15]; ValueError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--layer-ids is {text!r}; expected whole numbers, comma-separated"
        ) from None


def tell(report: "Report", out: Path) -> None:
    """What was written, and what `spec check` says of it."""
    facts: dict[str, Any] = report.facts
    shown = ("layout", "algorithm", "target_layer_ids", "num_draft_tokens", "dtype", "parameters")
    show.record({key: facts[key] for key in shown}, as_json=False)
    for line in report_lines(report):
        print(line)
    print(show.written(out))


def report_lines(report: "Report") -> list[str]:
    """Two lines a finding; one where there is none."""
    engine = report.facts["checked_for"]
    return show.finding_lines(report.findings) or [
        f"nothing wrong that the files show, for {engine}"
    ]
