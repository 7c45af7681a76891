"""Drafters on the real engine in several settings: the README's table of histograms equal to ours.

    python benchmarks/parity.py --target T --draft D [D ...] --prompts P --python PATH --out DIR

A setting is `float32` or `bfloat16`, with `-tp2` for two ranks. All drafters read the same layers:
the engine's plain answers are made once a setting. Writes DIR/SETTING/NAME/verify.json, prints a
line a drafter and setting.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from spec.cli.inputs import drafter_name, read_sources
from spec.export.engine_runs import Plain, measure, run_plain
from spec.export.plan import Plan
from spec.export.verify import Verification, verify, write_verification

HEAD = (
    "| drafter | setting | passed | single | batched | cached | text as plain | "
    "acceptance length, engine | ours | answers that are ours | their length, engine / ours |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def row(name: str, setting: str, result: Verification) -> str:
    """A line of the table: per pass, how many requests have our histogram."""
    equal = [f"{p.num_equal_histogram} of {p.num_requests}" for p in result.passes]
    equal += ["-"] * (3 - len(equal))
    text = sum(p.num_equal_text for p in result.passes)
    requests = sum(p.num_requests for p in result.passes)
    lengths = [f"{p.acceptance_length:.3f}" for p in result.passes]
    ours = f"{result.passes[0].acceptance_length_ours:.3f}" if result.passes else "-"
    passed = "yes" if result.passed else "no"
    cells = [name, setting, passed, *equal, f"{text} of {requests}", " / ".join(lengths), ours]
    # In bfloat16 an answer may leave ours at a near-tie; lengths compare where it did not.
    kept = [p for p in result.passes if p.num_our_text]
    cells.append(" / ".join(str(p.num_our_text) for p in result.passes))
    cells.append(
        ", ".join(
            f"{p.acceptance_length_same_text:.3f} / {p.acceptance_length_same_text_ours:.3f}"
            for p in kept
        )
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, nargs="+")
    parser.add_argument("--prompts", required=True, nargs="+")
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=["float32", "float32-tp2", "bfloat16"])
    parser.add_argument("--limit", type=int, default=40)
    options = parser.parse_args()
    prompts = read_sources(options.prompts, "heldout", options.limit)
    print(HEAD, flush=True)
    for setting in options.settings:
        dtype, *ranks = setting.split("-tp")
        plain: Plain | None = None
        layers: tuple[int, ...] = ()
        for draft in options.draft:
            name = drafter_name(draft)
            out = options.out / setting / name.replace("/", "-")
            plan_options: dict[str, Any] = {"dtype": dtype, "probe": False, "timeout": 1800.0}
            plan_options["tensor_parallel"] = int(ranks[0]) if ranks else 1
            plan = Plan(Path(draft), name, options.target, options.python, out, **plan_options)
            tell(f"{setting}, {name}")
            ours = measure(plan, prompts, tell)
            if plain is None:
                layers, plain = ours.layer_ids, run_plain(plan, ours, tell)
            assert ours.layer_ids == layers, f"{name} reads other layers than the first"
            result = verify(plan, prompts, tell=tell, ours=ours, plain=plain)
            write_verification(result, out)
            print(row(name, setting, result), flush=True)
            for finding in result.findings:
                tell(f"{finding.severity}: {finding.what}")


if __name__ == "__main__":
    main()
