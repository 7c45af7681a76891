"""The model card of a drafter: its README.md, written from what lies in the files and nothing else.

Facts come from config.json, the headers of the weights, spec.json and acceptance reports; what none
of them says is called not recorded. The card ends in a line with a hash of the rest, by which a
card that somebody wrote or changed by hand is told from one that may be written anew.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..data.jsonl import atomic_file
from ..dflash.files import PROVENANCE, read_provenance, stated
from ..dspark.calibration import STS
from ..dspark.schedule import SPS
from ..eval.report import REPORT, Report
from ..target.files import HUB_ID
from .card_record import check_record, check_report, plain, public
from .card_text import CardFacts, body, group_names
from .check import facts_of, look_at
from .findings import Subject

CARD = "README.md"
MARK = re.compile(r"<!-- written by spec card, sha256 ([0-9a-f]{64}); .* -->\n?\Z")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
PRIVATE = ("wandb",)  # sections of a recipe that are nobody else's business


@dataclass(frozen=True)
class Card:
    """A card's text, and the metadata block at its head."""

    text: str
    metadata: dict[str, Any]


def write_card(
    directory: str | Path,
    *,
    reports: Sequence[str | Path] = (),
    license: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
) -> Card:
    """Write the card of a drafter directory, as `out` or as its README.md; the same every time.

    Raises ValueError or FileNotFoundError as `make_card`, and where there is a card that was not
    written here.
    """
    path = card_path(directory, out)
    if path.exists() and not force and not is_ours(path):
        raise ValueError(
            f"{path} was written or changed by hand and stays: give --out, or --force to replace it"
        )
    card = make_card(directory, reports=reports, license=license, out=out)
    with atomic_file(path) as file:
        file.write(card.text.encode())
    return card


def card_path(directory: str | Path, out: str | Path | None) -> Path:
    """Where a card goes: `out`, or the README.md of the drafter."""
    return Path(directory) / CARD if out is None else Path(out)


def make_card(
    directory: str | Path,
    *,
    reports: Sequence[str | Path] = (),
    license: str | None = None,
    out: str | Path | None = None,
) -> Card:
    """The card of a drafter directory of any layout.

    `reports` join the one that spec.json carries. Without `license` the one that a card in the
    place of this one states is kept. Raises ValueError or FileNotFoundError where
    there is no drafter to read, for a report of another drafter, and for a licence that is no id.
    """
    if license is not None and not LICENSE.fullmatch(license):
        raise ValueError(
            f"--license is {license!r}; expected an id as the hub lists them, in small letters: "
            "apache-2.0, mit, other"
        )
    license = license or stated_license(card_path(directory, out))
    facts = read_facts(Path(directory), reports, license)
    data = metadata(facts)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body(facts)}")
    return Card(marked(str(card)), data.to_dict())


def is_ours(path: Path) -> bool:
    """Whether a card is as `write_card` left it."""
    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return False
    mark = MARK.search(text)
    return mark is not None and mark.group(1) == _digest(text[: mark.start()])


def marked(text: str) -> str:
    """A card with its last line."""
    return (
        f"{text}<!-- written by spec card, sha256 {_digest(text)}; a card that was changed is not "
        "replaced -->\n"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def stated_license(path: Path) -> str | None:
    """The licence id in a card's metadata, whoever wrote it; None where there is none."""
    try:
        block = REGEX_YAML_BLOCK.search(path.read_text(encoding="utf-8"))
        found = yaml.safe_load(block.group(2))["license"] if block else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and LICENSE.fullmatch(found) else None


def read_facts(directory: Path, reports: Sequence[str | Path], license: str | None) -> CardFacts:
    """Everything that the card says, from the directory's files and the reports."""
    subject = look_at(directory, values=False)
    if subject.refusal is not None:
        raise ValueError(f"{subject.refusal}; a card needs a drafter whose config.json is read")
    facts = facts_of(subject, "sglang")
    if (facts["num_draft_tokens"] or 0) < 1:
        raise ValueError(
            f"{directory / 'config.json'}: block_size is {facts['block_size']}, which drafts "
            "nothing; write the one it was trained with"
        )
    record = _public_record(directory)
    target = _target(record, subject)
    kind = "DSpark" if facts["algorithm"] == "dspark" else "DFlash"
    eight_bits = f"-{facts['quantized'].upper()}" if facts["quantized"] else ""
    name = f"{target.split('/')[-1]}-{kind}{eight_bits}" if target else public(facts["name"])
    # `spec quantize` leaves its report beside the drafter.
    beside = [path for path in (directory / REPORT,) if path.is_file()]
    found, unquantized = _reports(record, [*beside, *reports], facts, target)
    return CardFacts(
        name=plain(name),
        kind=kind,
        facts=plain(public(facts)),
        layout=subject.layout.name,
        max_positions=subject.whole("max_position_embeddings"),
        record=record,
        target=target,
        reports=found,
        unquantized=unquantized,
        side_files=tuple(n for n in (STS, SPS) if (directory / n).is_file()),
        license=license,
    )


def _public_record(directory: Path) -> dict[str, Any]:
    """spec.json without what is private; empty where there is none."""
    record = read_provenance(directory, strict=True)
    check_record(record, str(directory / PROVENANCE))
    recipe = record.get("recipe")
    if isinstance(recipe, dict):
        record["recipe"] = {key: recipe[key] for key in recipe if key not in PRIVATE}
    return public(record)


def _target(record: dict[str, Any], subject: Subject) -> str | None:
    """What spec.json, or vLLM's layout, calls the target; None where neither does."""
    name = stated(record, "target", "name")
    if name is None:
        nested = subject.data.get("speculators_config")
        named = nested.get("verifier") if isinstance(nested, dict) else None
        name = named.get("name_or_path") if isinstance(named, dict) else None
    return public(name) or None if isinstance(name, str) else None


def _reports(
    record: dict[str, Any],
    paths: Sequence[str | Path],
    facts: dict[str, Any],
    target: str | None,
) -> tuple[tuple[Report, ...], Report | None]:
    """The reports of the files and spec.json's, none twice.

    A quantized drafter's spec.json still has the report of the drafter it was made from: that one
    comes apart. Nobody asked for spec.json's, so one that says too little is as if not recorded.
    """
    found: list[Report] = []
    made_for = {"target": target, "revision": stated(record, "target", "revision")}
    for path in paths:
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no JSON ({error}); expected a report.json") from None
        report = public(check_report(read, str(path), facts, **made_for))
        if report not in found:
            found.append(report)
    try:
        own = record.get("acceptance_report")
        own = check_report(own, "spec.json's acceptance_report", facts, **made_for)
    except ValueError:
        return tuple(found), None
    if record.get("quantization"):
        return tuple(found), own
    # The run's report.json says the same and has the comparisons besides.
    if not any(_measured(own) == _measured(report) for report in found):
        found.insert(0, own)
    return tuple(found), None


def _measured(report: Report) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "comparisons"}


def metadata(facts: CardFacts) -> ModelCardData:
    """The block that the hub reads; what is not known is left out."""
    is_hub_id = facts.target is not None and HUB_ID.fullmatch(facts.target)
    tags = ["speculative-decoding", facts.facts["algorithm"], "draft-model"]
    return ModelCardData(
        base_model=facts.target if is_hub_id else None,
        # Who loads the files; transformers does not.
        library_name="vllm" if facts.layout == "vllm" else "sglang",
        pipeline_tag="text-generation",
        license=facts.license,
        tags=[*tags, *filter(None, [facts.facts["quantized"]])],
        model_name=facts.name,
        eval_results=_results(facts) or None,
    )


def _results(facts: CardFacts) -> list[EvalResult]:
    """Acceptance length by group, each with its conditions."""
    results: list[EvalResult] = []
    for report in facts.reports:
        for name in group_names(report):
            group = report["groups"][name]
            if group["acceptance_length"] is None:
                continue
            low, high = group["acceptance_length_ci95"]
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type="prompts",
                    dataset_name=f"prompts: {name}",
                    dataset_config=name,
                    metric_type="acceptance_length",
                    metric_name="acceptance length, bonus token included",
                    metric_value=round(group["acceptance_length"], 3),
                    metric_args={
                        "ci95": [round(low, 3), round(high, 3)],
                        "num_draft_tokens": report["num_draft_tokens"],
                        "num_requests": group["num_requests"],
                        "temperature": report["temperature"],
                        "dtype": report["dtype"],
                    },
                )
            )
    return results
