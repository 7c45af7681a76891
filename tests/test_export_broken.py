"""Drafters broken on purpose: `spec check` or the probe of `spec verify` names what is wrong.

Each case breaks a trained drafter in one way. "check" sees it in the files; "record" in the files
beside the spec.json of the training; "probe" has to measure it, since the files alone look right.
Engines start with nearly all of them, serve the right text and say nothing.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import trained_draft
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_drafter import edit

from spec.data.prompts import read_prompts
from spec.eval.report import encode_groups
from spec.export.check import check
from spec.export.convert import export_draft
from spec.export.diagnosis import diagnose_drafter
from spec.export.probe import probe
from spec.recipes.algorithms import load_draft
from spec.target.model import Target

pytestmark = pytest.mark.slow

Break = Callable[[Path], None]
TOKENS = 48


def nested(**changes: object) -> Break:
    """Change keys of DFlash's config where they stand; block_size stands twice."""

    def change(folder: Path) -> None:
        own = json.loads((folder / "config.json").read_text())["dflash_config"]
        edit(folder, dflash_config={**own, **changes})
        if "block_size" in changes:
            edit(folder, block_size=changes["block_size"])

    return change


def flat(**changes: object) -> Break:
    return lambda folder: edit(folder, **changes)


def theta(value: float) -> Break:
    return flat(rope_parameters={"rope_type": "default", "rope_theta": value}, rope_theta=value)


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Break:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)

    return rewrite


def without(part: str) -> Break:
    return weights(lambda tensors: {k: v for k, v in tensors.items() if part not in k})


def renamed(old: str, new: str) -> Break:
    return weights(lambda tensors: {k.replace(old, new): v for k, v in tensors.items()})


def fc(change: Callable[[Tensor], Tensor]) -> Break:
    return weights(lambda tensors: {**tensors, "fc.weight": change(tensors["fc.weight"])})


def swapped(a: str, b: str) -> Break:
    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = {k.replace(a, "?").replace(b, a).replace("?", b): v for k, v in tensors.items()}
        return {k: turned[k] for k in tensors}

    return weights(swap)


def turned_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "markov_head.markov_w2.weight"
    return {**tensors, name: -tensors[name]}


def untrained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        k: torch.randn(v.shape, generator=draw) * 0.02 if v.dim() > 1 else v
        for k, v in tensors.items()
    }


def in_vllms_layout(folder: Path) -> None:
    export_draft(
        folder, folder.parent / "vllm", "vllm", target=str(trained_draft.target_directory())
    )
    shutil.rmtree(folder)
    (folder.parent / "vllm").rename(folder)


def labelled_dflash(folder: Path) -> None:
    """DSpark's backbone in DFlash's words, one slot more for the same number of drafts."""
    without("_head.")(folder)
    data = json.loads((folder / "config.json").read_text())
    own = {"target_layer_ids": data["target_layer_ids"], "mask_token_id": data["mask_token_id"]}
    heads = dict.fromkeys([k for k in data if k.startswith(("markov", "confidence", "enable"))])
    edit(folder, **heads, architectures=["DFlashDraftModel"], block_size=8)
    edit(folder, dflash_config={**own, "block_size": 8}, target_layer_ids=None, mask_token_id=None)


@dataclass(frozen=True)
class Case:
    what: str
    kind: str
    broken: Break
    caught_by: str
    named: str

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


EOS = 258
CASES = [
    Case("heads missing", "vanilla", without("markov_head."), "check", "markov_head"),
    Case(
        "heads named otherwise",
        "gated",
        renamed("markov_head.", "sequential_head."),
        "check",
        "markov_head",
    ),
    Case(
        "gated config, vanilla weights",
        "vanilla",
        flat(markov_head_type="gated"),
        "check",
        "weights are those of vanilla",
    ),
    Case("q norms missing", "dflash", without("q_norm"), "check", "q_norm"),
    Case(
        "a layer more in the config",
        "dflash",
        flat(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "check",
        "config.json says 3 draft layers, the file holds 2",
    ),
    Case("fc transposed", "dflash", fc(lambda w: w.t()), "check", "fc.weight"),
    Case("vLLM's numbering", "dflash", in_vllms_layout, "check", "speculators"),
    Case(
        "DSpark labelled DFlash", "rnn", flat(architectures=["DFlashDraftModel"]), "check", "DFlash"
    ),
    Case(
        "layer ids descending",
        "gated",
        flat(target_layer_ids=[3, 2, 1]),
        "check",
        "do not rise strictly",
    ),
    Case(
        "the mask token ends texts",
        "vanilla",
        flat(mask_token_id=EOS),
        "check",
        "mask_token_id 258 is '<|im_end|>'",
    ),
    Case("no block size", "vanilla", flat(block_size=None), "check", "block_size"),
    Case(
        "layer ids one too low, recorded",
        "dflash",
        nested(target_layer_ids=[0, 1, 2]),
        "record",
        "target_layer_ids is [0, 1, 2], the drafter was trained with [1, 2, 3]",
    ),
    Case("another theta, recorded", "gated", theta(1e6), "record", "rope is"),
    Case(
        "another mask token, recorded",
        "rnn",
        flat(mask_token_id=263),
        "record",
        "mask_token_id is 263",
    ),
    Case("a causal block, recorded", "dflash", flat(is_causal=True), "record", "is_causal is True"),
    Case(
        "layer ids one too low",
        "dflash",
        nested(target_layer_ids=[0, 1, 2]),
        "probe",
        "target_layer_ids [1, 2, 3] instead of [0, 1, 2]",
    ),
    Case("another theta", "vanilla", theta(1e6), "probe", "rope_theta 10000 instead of 1e+06"),
    Case(
        "slots shifted", "vanilla", labelled_dflash, "probe", "labelled DFlash and drafts as DSpark"
    ),
    Case(
        "fc's layers in another order",
        "rnn",
        fc(lambda w: w.unflatten(1, (3, -1)).flip(1).flatten(1)),
        "probe",
        "descending layer order",
    ),
    Case(
        "fc transposed, layer by layer",
        "gated",
        fc(lambda w: w.unflatten(1, (3, -1)).transpose(0, 2).flatten(1)),
        "probe",
        "fc transposed",
    ),
    Case(
        "the head's sign turned",
        "vanilla",
        weights(turned_head),
        "probe",
        "the sequential head makes the drafts worse",
    ),
    Case(
        "markov_w1 and markov_w2 swapped",
        "gated",
        swapped("markov_w1", "markov_w2"),
        "probe",
        "markov_w1 and markov_w2",
    ),
    Case("never trained", "dflash", weights(untrained), "probe", "almost nothing is accepted"),
]


@cache
def target() -> Target:
    return Target.load(trained_draft.target_directory())


@cache
def prompts() -> list[list[int]]:
    asked = read_prompts(trained_draft.prompt_file())[:8]
    groups, _ = encode_groups(target(), asked, TOKENS + 8)
    return [ids for group in groups.values() for ids in group]


def diagnosis(case: Case, folder: Path) -> list[str]:
    """The defects that are found; the files alone have to look right to the probe."""
    shutil.copytree(trained_draft.trained_draft(case.kind), folder)
    if case.caught_by != "record":
        (folder / "spec.json").unlink()
    case.broken(folder)
    report = check(folder, target=str(trained_draft.target_directory()))
    seen = [each.what for each in report.findings if each.severity == "defect"]
    if case.caught_by != "probe":
        return seen
    assert seen == []
    probed = probe(load_draft(folder), target(), prompts(), max_new_tokens=TOKENS)
    found = diagnose_drafter(probed, probed.acceptance_length, None)
    return [each.what for each in found if each.severity == "defect"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_drafter_is_named(case: Case, tmp_path: Path) -> None:
    found = diagnosis(case, tmp_path / "draft")
    assert any(case.named in line for line in found), found


@pytest.mark.parametrize("kind", trained_draft.KINDS)
def test_a_right_one_is_not(kind: str, tmp_path: Path) -> None:
    assert diagnosis(Case("right", kind, lambda _: None, "record", ""), tmp_path / "a") == []
    assert diagnosis(Case("right", kind, lambda _: None, "probe", ""), tmp_path / "b") == []
