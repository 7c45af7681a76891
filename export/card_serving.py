"""How a card says to serve a drafter: the commands of SGLang and vLLM with the right counts."""

from typing import Any

from ..dspark.calibration import STS
from ..dspark.schedule import SPS
from ..target.files import HUB_ID
from .card_record import plain
from .counts import sglang_options, vllm_speculative_config

DRAFTER, CONVERTED = "DRAFTER", "CONVERTED"


def serving(
    facts: dict[str, Any],
    layout: str,
    target: str | None,
    side_files: tuple[str, ...],
) -> list[str]:
    """Both engines, each with what has to be converted first."""
    # It stands in commands: nothing but an id of a hub.
    named = target if target and HUB_ID.fullmatch(target) else "TARGET"
    words = f"`{DRAFTER}` is this directory, or its id on a hub"
    known = f" ({plain(target)})" if target else ""
    also = "" if named == target else f"; `TARGET` is the target{known}"
    quantized = facts["quantized"] is not None
    return [
        f"{words}{also}.",
        "",
        *_sglang(facts, layout, named, quantized, side_files),
        "",
        *_vllm(facts, layout, named, target, quantized),
    ]


def _sglang(
    facts: dict[str, Any], layout: str, target: str, quantized: bool, side_files: tuple[str, ...]
) -> list[str]:
    drafts, heads = facts["num_draft_tokens"], facts["heads"] or {}
    if facts["algorithm"] == "dspark" and not heads.get("markov_rank"):
        return ["**SGLang** refuses it: its DSPARK wants a `markov_rank` above 0."]
    foreign = layout == "vllm"
    drafter = CONVERTED if foreign else DRAFTER
    options = sglang_options(facts["algorithm"], drafts, quantized=quantized)
    lines = [
        f"**SGLang** counts the anchor: {drafts} draft tokens are {drafts + 1} there.",
        "",
        "```bash",
        *([f"spec import {DRAFTER} --out {CONVERTED}"] if foreign else []),
        f"python -m sglang.launch_server --model-path {target} \\",
        f"  --speculative-draft-model-path {drafter} \\",
        "  " + " ".join(options).replace(" --", " \\\n  --"),
        "```",
    ]
    if heads.get("enable_confidence_head"):
        lines += ["", _confidence(drafter, side_files)]
    return lines


def _confidence(drafter: str, side_files: tuple[str, ...]) -> str:
    """What makes the engine use the confidence head, and the files that go with it."""
    options = {
        STS: f"`--speculative-dspark-confidence-sts-path {drafter}/{STS}`",
        SPS: f"`--speculative-dspark-sps-table-path {drafter}/{SPS}`",
    }
    given = " and ".join(options[name] for name in side_files)
    return (
        "The confidence head decides how many draft tokens are verified only with "
        "`SGLANG_RAGGED_VERIFY_MODE=cap-accept` in the environment"
        + (f", and {given}." if given else "; it is not calibrated (`spec calibrate` does that).")
    )


def _vllm(
    facts: dict[str, Any], layout: str, target: str, known: str | None, quantized: bool
) -> list[str]:
    drafts, head = facts["num_draft_tokens"], (facts["heads"] or {}).get("markov_head_type")
    if head is not None and head != "vanilla":
        return [f"**vLLM** has the vanilla Markov head only; this drafter's is {head}."]
    native = layout == "vllm"
    if quantized and not native:
        return [
            "**vLLM** loads the layout of speculators, into which quantized weights are not "
            "converted: export the drafter that this one was quantized from."
        ]
    drafter = DRAFTER if native else CONVERTED
    export = f"spec export --draft {DRAFTER} --to vllm --out {CONVERTED}"
    return [
        f"**vLLM** does not count the anchor: {drafts} draft tokens are {drafts} there."
        + ("" if native else " It loads the layout that `spec export --to vllm` writes."),
        "",
        "```bash",
        *([] if native else [export if known else f"{export} --target {target}"]),
        f"vllm serve {target} --speculative-config \\",
        f"  '{vllm_speculative_config(facts['algorithm'], drafts, drafter)}'",
        "```",
    ]
