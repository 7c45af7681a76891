"""`spec calibrate` and `spec plan verify`."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from . import show
from .options import (
    DtypeOption,
    JsonOption,
    LimitOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

EXAMPLE = "Example: `spec calibrate -t ./model -d runs/a/draft -p code.jsonl`"
PLAN_EXAMPLE = "Example: `spec plan verify --survival calibration.json --sps sps.json -o plan`"

plan = typer.Typer(
    no_args_is_help=True,
    help="Compute what a deployment would bring, from what was measured.",
    epilog=PLAN_EXAMPLE,
)


@plan.callback()
def options() -> None:
    """Compute what a deployment would bring, from what was measured."""


def calibrate(
    target: TargetOption,
    draft: Annotated[
        Path,
        typer.Option("--draft", "-d", help="Drafter directory; sts.json and sps.json go there."),
    ],
    prompts: PromptsOption,
    heldout: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts to measure on; without them half of the requests are kept for that. May "
            "be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Report and plots; `calibration` in DRAFT by default."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Time steps and write sps.json.")
    ] = True,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Largest step to time, in tokens.")
    ] = 128,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write sts.json from few rounds or with a greater error too."),
    ] = False,
    limit: LimitOption = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Calibrate a drafter's confidence (sts.json) and time verification (sps.json).

    A built-in source of prompts gives its held-out part: the drafter was trained on the other.
    """
    from ..data.jsonl import stem
    from ..dspark.schedule import SPS
    from ..eval.calibrate import calibrate as run
    from ..eval.calibrate import encode_prompts, write_calibration
    from ..eval.profile import profile as time_steps
    from ..eval.profile import write_cost_table
    from ..eval.sts import weights_digest
    from . import inputs

    sampling = inputs.sampling(temperature, top_p, top_k, seed)
    asked = inputs.read_sources(prompts, "heldout", limit)
    kept = inputs.read_sources(heldout, "heldout", limit) if heldout else None
    loaded = inputs.load_target(target, dtype)
    drafter = inputs.load_drafter(str(draft), loaded, 1)
    result = run(
        loaded,
        drafter,
        asked,
        heldout=kept,
        draft_name=inputs.drafter_name(str(draft)),
        draft_weights=weights_digest(draft),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        sampling=sampling,
    )
    where = out or draft / "calibration"
    write_calibration(result, where)
    written = settle(result, draft, dataset=", ".join(map(stem, prompts)), force=force)
    if profile:
        contexts, _ = encode_prompts(loaded, asked, max_new_tokens + drafter.num_draft_tokens)
        table = time_steps(
            loaded, drafter, contexts, max_batch_tokens=max_batch_tokens, sampling=sampling
        )
        write_cost_table(table, draft)
        written.append(SPS)
        result["steps"] = table.to_json()
    if as_json:
        show.record({key: value for key, value in result.items() if key != "rounds"}, as_json=True)
        return
    for line in calibration_lines(result):
        print(line)
    print(f"wrote {' and '.join(written) or 'nothing'} in {draft}, the report in {where}")


def settle(result: dict[str, Any], draft: Path, *, dataset: str, force: bool) -> list[str]:
    """Write sts.json where it is worth it, and say so where not; returns what was written."""
    from ..dspark.calibration import GRID, STS
    from ..eval.sts import edge_slots, objection, write_sts

    edges = edge_slots(result["temperatures"])
    if edges:
        warnings.warn(
            f"the temperatures of slots {', '.join(map(str, edges))} are at an end of what is "
            f"tried ({GRID[0]:g} to {GRID[-1]:g}), expected one between: the confidence says "
            "little there, or the rounds are too few; see the held-out ECE or give more prompts",
            stacklevel=2,
        )
    against = objection(result)
    if against and not force:
        left = "kept the earlier sts.json" if (draft / STS).exists() else "wrote no sts.json"
        warnings.warn(f"{left}: {against}, or write it with --force", stacklevel=2)
        return []
    write_sts(result, draft, dataset=dataset)
    return [STS]


@plan.command(epilog=PLAN_EXAMPLE)
def verify(
    survival: Annotated[
        Path, typer.Option(help="calibration.json (requests differ) or report.json (all alike).")
    ],
    sps: Annotated[Path, typer.Option(help="Cost table of `spec calibrate` or of an engine.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of plan.json and plan.png.")],
    concurrency: Annotated[
        str, typer.Option(help="Numbers of concurrent requests, comma-separated.")
    ] = "1,2,4,8,16,32,64,128,256",
    as_json: JsonOption = False,
) -> None:
    """Throughput against concurrency: fixed verification lengths and the prefix scheduler."""
    from ..dspark.schedule import read_cost_table
    from ..eval.plan import plan_verification, read_survivals, write_plan

    result = plan_verification(
        read_survivals(survival), read_cost_table(sps), whole_numbers(concurrency)
    )
    write_plan(result, out)
    if as_json:
        show.record(result, as_json=True)
        return
    for line in plan_lines(result):
        print(line)
    print(f"wrote {out}")


def whole_numbers(text: str) -> list[int]:
    """`1,2,4` -> [1, 2, 4]; ValueError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--concurrency is {text!r}; expected whole numbers, comma-separated"
        ) from None


def calibration_lines(result: dict[str, Any]) -> list[str]:
    """A row a slot: temperature, then survival, calibration error and rank statistic."""
    fit, heldout = result["fit"], result["heldout"]
    lines = [
        f"fitted on {fit['num_rounds']} rounds of {fit['num_requests']} requests, measured on "
        f"{heldout['num_rounds']} rounds of {heldout['num_requests']} others; "
        f"{fit['num_left_out'] + heldout['num_left_out']} rounds left out",
        "slot  temperature  survival  predicted before  after    ECE before  after    "
        "AUC before  after",
    ]
    for k in range(result["num_draft_tokens"]):
        before, after = (result[f"predicted_survival_{when}"][k] for when in ("before", "after"))
        auc_before, auc_after = (_three(result[f"auc_{when}"][k]) for when in ("before", "after"))
        lines.append(
            f"{k + 1:>4}  {result['temperatures'][k]:>11.3f}  {result['survival_at'][k]:>8.3f}  "
            f"{before:>16.3f}  {after:>5.3f}    {result['ece_before'][k]:>10.3f}  "
            f"{result['ece_after'][k]:>5.3f}    {auc_before:>10}  {auc_after:>5}"
        )
    return lines


def plan_lines(result: dict[str, Any]) -> list[str]:
    """Tokens a second: a row a concurrency, a column a policy; then what the scheduler verifies."""
    policies = result["policies"]
    lines = [
        "expected tokens/s, by verified drafted tokens a request (last: those of the scheduler)",
        "requests  " + "  ".join(f"{name:>9}" for name in policies) + "   verified",
    ]
    for i, requests in enumerate(result["concurrency"]):
        rates = "  ".join(
            f"{figures['tokens_per_second'][i]:>9.1f}" for figures in policies.values()
        )
        verified = policies["scheduler"]["verified_per_step"][i] / requests
        # A step may be longer than any that was timed.
        largest = max(figures["verified_per_step"][i] for figures in policies.values())
        mark = " *" if requests + largest > result["max_profiled_tokens"] else ""
        lines.append(f"{requests:>8}  {rates}   {verified:>8.2f}{mark}")
    if any(line.endswith("*") for line in lines):
        lines.append(
            f"* steps of more than the {result['max_profiled_tokens']} tokens that were timed: "
            "extrapolated"
        )
    return lines


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
