"""Options that several verbs share."""

from typing import Annotated, Literal

import typer

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="Model directory, hub id or .gguf file.")
]
PairOption = Annotated[
    str | None,
    typer.Option("--target", "-t", help="The model it belongs to: directory, hub id or .gguf."),
]
PromptsOption = Annotated[
    list[str],
    typer.Option(
        "--prompts",
        "-p",
        help="JSONL of prompts, or a built-in source: stdlib, tiny. May be repeated.",
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Take the first so many of each.")]
DtypeOption = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Compute dtype of the target.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest of this mass.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Sample from so many; 0: all.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling.")]
