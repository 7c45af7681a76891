"""`spec <verb>`: the command line of the toolkit.

Each verb imports what it needs when it runs, so that `spec --help` and a mistyped option answer at
once. A mistake of the user (a ValueError or an OSError of the library) ends as one line on stderr
and exit code 2; SPEC_TRACEBACK=1 shows where it came from. Ctrl-C ends with 130.
"""

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from . import calibrate, card, export, quantize, serve, show, verify
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

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and evaluate drafters for speculative decoding.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    warnings.formatwarning = lambda message, *_args, **_options: show.warning(message)
    try:
        app(arguments)
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        if os.environ.get("SPEC_TRACEBACK") == "1":
            raise
        print(f"spec: {show.one_line(error)}", file=sys.stderr)
        sys.exit(2)


def print_version(wanted: bool) -> None:
    """Print the version and stop, where `--version` was given."""
    if wanted:
        print(f"spec {importlib.metadata.version('spec-toolkit')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train and evaluate drafters for speculative decoding."""


@app.command(epilog="Example: `spec inspect Qwen/Qwen3-4B`")
def inspect(
    target: Annotated[str, typer.Argument(help="Model directory, hub id or .gguf file.")],
    as_json: JsonOption = False,
) -> None:
    """Tell what a target is and whether it is supported, before any work."""
    from ..target.inspect import inspect_target

    show.record(inspect_target(target), as_json=as_json)


@app.command(epilog="Example: `spec recipes --keys`")
def recipes(
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key of a recipe instead, with its default.")
    ] = False,
) -> None:
    """List the recipes that ship with the toolkit."""
    if keys:
        from ..recipes.schema import DSPARK_DEFAULTS, Recipe

        for line in show.schema_lines(Recipe, DSPARK_DEFAULTS):
            print(line)
        return
    found = show.shipped_recipes()
    width = max((len(name) for name, _ in found), default=0)
    for name, line in found:
        print(f"{name:<{width}}  {line}")


@app.command(epilog="Example: `spec train --recipe tiny out=runs/tiny train.minutes=1`")
def train(
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="A YAML file, or the name of a shipped recipe.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted `key=value` pairs that replace the recipe's.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest checkpoint under `out`, if there is one.")
    ] = True,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the resolved recipe and stop.")
    ] = False,
) -> None:
    """Train a drafter as a recipe says."""
    from ..recipes.load import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    print(resolved.to_yaml(), end="", flush=True)
    if only_print:
        return
    from ..train.loop import train as run

    draft = run(resolved, resume=resume) / "draft"
    # A run that was asked to stop early may have none yet.
    if (draft / "config.json").exists():
        card.leave_card(draft)


@app.command(epilog="Example: `spec prepare -t ./model --conversations chats.jsonl -o rows.jsonl`")
def prepare(
    target: TargetOption,
    conversations: Annotated[
        list[Path],
        typer.Option("--conversations", "-c", help="JSONL of conversations; may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Rows to write, .jsonl or .jsonl.zst.")],
    max_length: Annotated[int, typer.Option(min=2, help="Longest row in tokens.")] = 4096,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the tokenizer run its own code.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn conversations into rows: token ids with a loss mask, and a manifest beside them."""
    from ..data.conversations import prepare as run

    manifest = run(
        target, conversations, out, max_length=max_length, trust_remote_code=trust_remote_code
    )
    show.record(manifest, as_json=as_json)


@app.command(epilog="Example: `spec regenerate -t ./model -p prompts.jsonl -o rows.jsonl`")
def regenerate(
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Rows to write, .jsonl.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers generated at a time.")] = 32,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    limit: LimitOption = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Let the target answer prompts itself; an interrupted run goes on where it stopped.

    A built-in source gives its training part.
    """
    from ..data.regenerate import regenerate as run
    from .inputs import load_target, read_sources

    summary = run(
        load_target(target, dtype),
        read_sources(prompts, "train", limit),
        out,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
    )
    show.record(summary, as_json=as_json)


@app.command(
    "eval", epilog="Example: `spec eval -t ./model -d runs/a/draft -p code.jsonl -o report`"
)
def evaluate(
    target: TargetOption,
    draft: Annotated[
        list[str],
        typer.Option(
            "--draft",
            "-d",
            help="Drafter directory, or ngram. Repeated: the report is the first one's, the others "
            "are set beside it.",
        ),
    ],
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the report.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Proposals of ngram.")] = 7,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Verify drafted tokens while their prefix survives with at least this "
            "probability, says the confidence head of the first drafter; the others verify all.",
        ),
    ] = None,
    limit: LimitOption = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Measure a drafter's acceptance length against plain decoding.

    A built-in source of prompts gives its held-out part. Groups are the prompts' tags, or the
    files' names.
    """
    from ..eval.render import markdown
    from ..eval.report import Baseline, write_report
    from ..eval.report import evaluate as run
    from . import inputs

    sampling = inputs.sampling(temperature, top_p, top_k, seed)
    asked = inputs.read_sources(prompts, "heldout", limit)
    loaded = inputs.load_target(target, dtype)
    baseline: Baseline = {}
    drafters = [inputs.load_drafter(path, loaded, num_draft_tokens) for path in draft]
    verified = inputs.schedules(draft, drafters, threshold, sampling)
    reports = [
        run(
            loaded,
            drafter,
            asked,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            draft_name=inputs.drafter_name(path),
            sampling=sampling,
            schedule=schedule,
            schedule_name=schedule_name,
            baseline=baseline,
            room=max(each.num_draft_tokens for each in drafters),
        )
        for path, drafter, (schedule, schedule_name) in zip(draft, drafters, verified, strict=True)
    ]
    written = write_report(reports[0], out, comparisons=reports[1:])
    if as_json:
        print(written.read_text(), end="")
        return
    print(markdown({**reports[0], "comparisons": reports[1:]} if reports[1:] else reports[0]))
    print(f"wrote {written.parent}")


app.command(epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.add_typer(calibrate.plan, name="plan")
app.command(epilog=export.CHECK_EXAMPLE)(export.check)
app.command(epilog=export.EXPORT_EXAMPLE)(export.export)
app.command("import", epilog=export.IMPORT_EXAMPLE)(export.import_)
app.command(epilog=card.EXAMPLE)(card.card)
app.command(epilog=quantize.EXAMPLE)(quantize.quantize)
app.command(epilog=serve.EXAMPLE)(serve.serve)
app.command(epilog=verify.EXAMPLE)(verify.verify)
