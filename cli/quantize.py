"""`spec quantize`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import show
from .card import leave_card
from .options import DtypeOption, JsonOption, LimitOption, PairOption

if TYPE_CHECKING:
    from ..data.prompts import Prompt
    from ..target.model import Target

EXAMPLE = (
    "Example: `spec quantize -d runs/a/draft --to fp8 -o runs/a/draft-fp8 -t ./model -p code.jsonl`"
)


class Keep(StrEnum):
    """What --keep takes; typer lists no Literal."""

    qkv = "qkv"
    attention = "attention"
    mlp = "mlp"


KEEP = {Keep.qkv: ("qkv",), Keep.attention: ("qkv", "o"), Keep.mlp: ("gate_up", "down")}


def quantize(
    draft: Annotated[Path, typer.Option("--draft", "-d", help="Drafter directory, of any layout.")],
    to: Annotated[Literal["fp8"], typer.Option("--to", help="Type of the projections.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to make.")],
    target: PairOption = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            "-p",
            help="JSONL of held-out prompts, or a built-in source: stdlib, tiny. May be repeated.",
        ),
    ] = None,
    scheme: Annotated[
        Literal["channel", "block"],
        typer.Option(
            help="channel: a scale an output row, activations a scale a token; block: 128 x 128."
        ),
    ] = "channel",
    keep: Annotated[
        list[Keep] | None,
        typer.Option(help="Projections to leave in bfloat16. May be repeated."),
    ] = None,
    max_drop: Annotated[
        float,
        typer.Option(min=0.0, max=100.0, help="Loss of acceptance length to allow, in percent."),
    ] = 1.0,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Measure the acceptance length before and after; without, nothing is known of it.",
        ),
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    limit: LimitOption = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Make the FP8 drafter of a drafter, and measure what that costs.

    Attention and MLP projections become e4m3, the rest bfloat16. A built-in source of prompts gives
    its held-out part. Exit code 1, and no directory, where the acceptance length falls by more than
    --max-drop.
    """
    from ..dflash.fp8 import PARTS, Quantization
    from ..export.fp8 import AcceptanceLostError, Gate, MeasureOptions, quantize_draft
    from . import inputs

    kept = {part for each in keep or [] for part in KEEP[each]}
    quantization = Quantization(scheme, tuple(part for part in PARTS if part in kept))
    gate = None
    if not measure and (target is not None or prompts):
        raise ValueError(
            "--target and --prompts are ignored beside --no-measure: leave it out to measure, or "
            "leave them out"
        )
    if measure:
        options = MeasureOptions(max_new_tokens, batch_size)
        loaded, asked = measured_on(target, prompts, dtype, limit)
        inputs.warn_of_another_target(str(draft), loaded)
        gate = Gate(loaded, asked, options, max_drop / 100)
    name = inputs.drafter_name(str(draft))
    try:
        summary = quantize_draft(draft, out, quantization, name=name, gate=gate)
    except AcceptanceLostError as error:
        tell(error.summary, as_json=as_json)
        typer.echo(f"spec: {error}", err=True)
        raise typer.Exit(1) from None
    tell(summary, as_json=as_json)
    if not as_json:
        print(show.written(out))
    leave_card(out, of=draft)


def measured_on(
    target: str | None, prompts: list[str] | None, dtype: str, limit: int | None
) -> "tuple[Target, list[Prompt]]":
    """The target and the held-out prompts; ValueError where either was not given."""
    from . import inputs

    if target is None or not prompts:
        raise ValueError(
            "no --target or no --prompts to measure the acceptance length on; give both, or "
            "--no-measure where the target cannot be loaded here"
        )
    return inputs.load_target(target, dtype), inputs.read_sources(prompts, "heldout", limit)


def tell(summary: dict[str, Any], *, as_json: bool) -> None:
    """The summary as JSON, or its figures as a reader wants them."""
    if as_json:
        show.record(summary, as_json=True)
        return
    lines: dict[str, Any] = {
        "scheme": summary["scheme"],
        "kept in bfloat16": ", ".join(summary["kept"]) or "none of the projections",
        "size": f"{summary['bytes_fp8']:,} bytes, {summary['size_ratio']:.3f} of the "
        f"{summary['bytes_bfloat16']:,} in bfloat16",
    }
    if summary["markov_head_share_of_bfloat16"]:
        lines["Markov head"] = (
            f"{summary['markov_head_share_of_bfloat16']:.1%} of those in bfloat16; stays so"
        )
    if "relative_change" in summary:
        low, high = summary["relative_change_ci95"]
        lines["acceptance length"] = (
            f"{summary['acceptance_length_before']:.3f} before, "
            f"{summary['acceptance_length_after']:.3f} after"
        )
        lines["change"] = (
            f"{summary['relative_change']:+.2%} [{low:+.2%}, {high:+.2%}], "
            f"{summary['num_requests']} requests; allowed -{summary['max_drop']:.2%}"
        )
    else:
        lines["acceptance length"] = "not measured"
    show.record(lines, as_json=False)
