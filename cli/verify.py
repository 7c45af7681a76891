"""`spec verify`: the parity gate of a drafter on a real engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..export.plan import Device, Dtype, Plan
from .engine import PythonOption, require_python
from .engine import tell as say
from .options import JsonOption, LimitOption, PromptsOption, TargetOption
from .show import finding_lines

if TYPE_CHECKING:
    from ..export.verify import Verification

EXAMPLE = (
    "Example: `spec verify runs/a/draft -t ./model -p code.jsonl --python .venv-sglang/bin/python`"
)


def verify(
    directory: Annotated[Path, typer.Argument(help="Drafter directory, as the engine loads it.")],
    target: TargetOption,
    prompts: PromptsOption,
    engine_arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: more options of the engine, as it is served."),
    ] = None,
    engine: Annotated[Literal["sglang"], typer.Option(help="Who is to accept.")] = "sglang",
    python: PythonOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Directory of verify.json and the engine's logs.")
    ] = Path("runs/verify"),
    limit: LimitOption = 40,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = (
        Plan.max_new_tokens
    ),
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="float32: histograms have to be equal; bfloat16: lengths within --tolerance."
        ),
    ] = Plan.dtype,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Share of the acceptance length, in bfloat16 or FP8.")
    ] = Plan.tolerance,
    device: Annotated[Device, typer.Option(help="Where both run.")] = Plan.device,
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="Ranks of the engine.")] = (
        Plan.tensor_parallel
    ),
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for a start, and for each request.")
    ] = Plan.timeout,
    check: Annotated[bool, typer.Option(help="Run spec check first, stop at a defect.")] = (
        Plan.check_first
    ),
    probe: Annotated[bool, typer.Option(help="Look for mistakes that the engine shares.")] = (
        Plan.probe
    ),
    as_json: JsonOption = False,
) -> None:
    """Prove a drafter on the real engine, request by request; exit code 1 where it fails.

    Compares hidden states, tokens, and each request's histogram of accepted drafts with ours.
    """
    from ..export.verify import VERIFICATION, write_verification
    from ..export.verify import verify as run
    from ..serve.arguments import check_arguments
    from ..target.engine import ends_in_order
    from . import inputs

    check_arguments(engine_arguments or ())
    plan = Plan(
        directory=directory,
        name=inputs.drafter_name(str(directory)),
        target=target,
        python=require_python(python),
        logs=out,
        dtype=dtype,
        device=device,
        tensor_parallel=tensor_parallel,
        max_new_tokens=max_new_tokens,
        tolerance=tolerance,
        timeout=timeout,
        engine_arguments=tuple(engine_arguments or ()),
        check_first=check,
        probe=probe,
    )
    # A run that fails must not leave an older verdict behind.
    (out / VERIFICATION).unlink(missing_ok=True)
    asked = inputs.read_sources(prompts, "heldout", limit)
    with ends_in_order():
        result = run(plan, asked, tell=say)
    path = write_verification(result, out)
    if as_json:
        print(path.read_text(), end="")
    else:
        tell(result)
        print(f"wrote {path}")
    if not result.passed:
        raise typer.Exit(1)


def tell(result: "Verification") -> None:
    """The table of a verification and what it means."""
    rows = [
        (
            each.name,
            f"{each.num_equal_text} of {each.num_requests}",
            f"{each.num_equal_histogram} of {each.num_requests}",
            f"{each.acceptance_length:.3f}",
            f"{each.acceptance_length_ours:.3f}",
        )
        for each in result.passes
    ]
    if result.layers:
        errors = ", ".join(f"layer {m.layer_id}: {m.error:.1e}" for m in result.layers)
        print(f"hidden states, relative error: {errors}")
    if rows:
        head = ("pass", "text as plain", "histogram as ours", "acceptance length", "ours")
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        for row in (head, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    for line in finding_lines(result.findings):
        print(line)
    print("passed" if result.passed else "failed")
