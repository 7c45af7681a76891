"""The report: groups, baseline, files, the same twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spec.data.prompts import Prompt
from spec.dflash.draft import Choose, Proposal
from spec.eval.ngram import NgramDrafter
from spec.eval.render import markdown
from spec.eval.report import Baseline, evaluate, progress_bar, without_timing, write_report
from spec.target.model import Target
from spec.target.sampling import Sampling

GROUP_KEYS = {
    "num_requests",
    "num_rounds",
    "num_tokens",
    "num_drafted",
    "num_accepted",
    "acceptance_length",
    "acceptance_length_ci95",
    "acceptance_rate",
    "survival_at",
    "conditional_acceptance_at",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
}


@pytest.fixture(scope="module")
def target() -> Target:
    words = {f"w{i}": i for i in range(61)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w2"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    return Target.of(LlamaForCausalLM(config), tokenizer, name="tiny")


def prompts() -> list[Prompt]:
    texts = {
        "code": ["w5 w6 w7 w5 w6 w7 w5", "w9 w8 w9 w8"],
        "prose": ["w11 w12", "w40 w3 w4 w40 w3", "w7 " * 60],
    }
    return [
        Prompt(f"{tag}-{i}", [{"role": "user", "content": text}], tag)
        for tag, group in texts.items()
        for i, text in enumerate(group)
    ]


def report_of(target: Target, baseline: Baseline | None = None) -> dict:
    return evaluate(
        target,
        NgramDrafter(4),
        prompts(),
        max_new_tokens=12,
        batch_size=2,
        draft_name="n-gram",
        baseline=baseline,
    )


def test_the_report_has_every_key_and_its_sums_agree(target: Target) -> None:
    report = report_of(target)
    assert list(report["groups"]) == ["all", "code", "prose"]
    assert (report["schema"], report["engine"], report["target"]) == (1, "spec", "tiny")
    assert (report["draft"], report["algorithm"]) == ("n-gram", "ngram")
    assert (report["num_draft_tokens"], report["temperature"]) == (4, 0.0)
    assert report["dtype"] == "float32"
    assert report["num_skipped"] == {"too long for the target": 1}
    everything = report["groups"]["all"]
    assert everything["num_requests"] == 4
    for group in report["groups"].values():
        assert set(group) >= GROUP_KEYS
        assert group["equal_to_plain"] == 1.0
        assert group["speedup"] == pytest.approx(
            group["tokens_per_second"] / group["baseline_tokens_per_second"]
        )
    for key in ("num_requests", "num_rounds", "num_tokens", "num_drafted", "num_accepted"):
        assert everything[key] == sum(report["groups"][g][key] for g in ("code", "prose"))


def test_twice_on_the_same_inputs_differs_in_timing_only(target: Target) -> None:
    first, second = report_of(target), report_of(target)
    assert first != second
    assert without_timing(first) == without_timing(second)
    assert "speedup" not in without_timing(first)["groups"]["all"]
    first["groups"]["code"]["num_accepted"] += 1
    assert without_timing(first) != without_timing(second)


def test_several_drafters_share_one_baseline(target: Target) -> None:
    baseline: Baseline = {}
    first = report_of(target, baseline)
    assert set(baseline) == {"code", "prose"}
    second = report_of(target, baseline)
    for name in first["groups"]:
        rates = [r["groups"][name]["baseline_tokens_per_second"] for r in (first, second)]
        assert rates[0] == rates[1]


class Unsure(NgramDrafter):
    """Sure of the first token only."""

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        tokens = super().propose(slots, anchors).tokens
        sure = torch.tensor([9.0, -9.0, -9.0, -9.0])
        return Proposal(tokens.clamp_min(3), confidence=sure.expand(tokens.shape))


def measured(target: Target, **options: Any) -> dict:
    return evaluate(
        target,
        Unsure(4),
        prompts(),
        max_new_tokens=12,
        batch_size=2,
        draft_name="unsure",
        **options,
    )


def test_with_a_schedule_drafted_means_verified(target: Target) -> None:
    def first_only(confidence: Tensor) -> Tensor:
        return (confidence > 0).sum(dim=-1)

    everything = measured(target)["groups"]["all"]
    assert everything["num_drafted"] == 4 * everything["num_rounds"]
    report = measured(target, schedule=first_only, schedule_name="first only")
    assert report["schedule"] == "first only"
    cut = report["groups"]["all"]
    assert cut["num_drafted"] == cut["num_rounds"] > 0
    assert cut["equal_to_plain"] == 1.0
    assert cut["acceptance_rate"] == cut["num_accepted"] / cut["num_drafted"]
    assert cut["acceptance_length"] == pytest.approx(1 + cut["survival_at"][0])
    assert cut["survival_at"][1:] == cut["conditional_acceptance_at"][1:] == [None] * 3
    assert "4 draft tokens a round, of which 1.00 verified (first only), temp" in markdown(report)


def test_a_sampled_report_states_how_and_compares_with_sampled_plain_decoding(
    target: Target,
) -> None:
    baseline: Baseline = {}
    report = measured(target, sampling=Sampling(0.8, 0.9, 20, seed=5), baseline=baseline)
    said = {key: report[key] for key in ("temperature", "top_p", "top_k", "seed", "schedule")}
    assert said == {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5, "schedule": None}
    assert report["groups"]["all"]["equal_to_plain"] is None
    text = markdown(report)
    assert "temperature 0.8, top-p 0.9, top-k 20, seed 5, float32" in text
    greedily: Baseline = {}
    measured(target, baseline=greedily)
    assert [d.output_ids for d in baseline["code"].decoded] != [
        d.output_ids for d in greedily["code"].decoded
    ]
    again = measured(target, sampling=Sampling(0.8, 0.9, 20, seed=5))
    assert without_timing(report) == without_timing(again)


def test_files_are_written_and_readable(target: Target, tmp_path: Path) -> None:
    report = report_of(target)
    other = {**report_of(target), "draft": "untrained | x"}
    path = write_report(report, tmp_path / "report", comparisons=[other])
    stored = json.loads(path.read_text())
    assert stored["groups"] == json.loads(json.dumps(report["groups"]))
    assert stored["comparisons"][0]["draft"] == "untrained | x"
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "acceptance.png",
        "report.json",
        "report.md",
    ]
    assert (path.parent / "acceptance.png").read_bytes()[:4] == b"\x89PNG"
    text = (path.parent / "report.md").read_text()
    assert "| untrained \\| x |" in text
    assert "1 too long for the target" in text
    length = report["groups"]["code"]["acceptance_length"]
    assert f"| code | 2 | {report['groups']['code']['num_rounds']} |" in text
    assert f"{length:.2f} [" in text
    assert "Acceptance length counts the bonus token" in text


def test_a_report_without_rounds_can_be_written(target: Target, tmp_path: Path) -> None:
    report = evaluate(
        target, NgramDrafter(3), prompts(), max_new_tokens=1, batch_size=2, draft_name="n-gram"
    )
    assert report["groups"]["all"]["acceptance_length"] is None
    assert "no rounds" in markdown(report)
    write_report(report, tmp_path)


def test_the_number_of_requests_is_told_first(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline: Baseline = {}
    for also in (", each without the drafter too", ""):
        report_of(target, baseline)
        # One of the five is too long.
        assert capsys.readouterr().err == f"evaluate n-gram: 4 requests to decode{also}\n"
    with progress_bar("calibrate", "d", 3, shown=False):
        assert capsys.readouterr().err == ""


def test_a_tag_named_all_does_not_replace_the_sum(target: Target) -> None:
    tagged = [Prompt("a", prompts()[0].messages, "all"), prompts()[2]]
    report = evaluate(
        target, NgramDrafter(3), tagged, max_new_tokens=4, batch_size=2, draft_name="n-gram"
    )
    assert list(report["groups"]) == ["all", "prose", "tag: all"]
    assert report["groups"]["all"]["num_requests"] == 2


def test_no_fitting_prompt_is_an_error(target: Target) -> None:
    with pytest.raises(ValueError, match="1 too long for the target"):
        evaluate(
            target,
            NgramDrafter(3),
            prompts()[-1:],
            max_new_tokens=4,
            batch_size=2,
            draft_name="n-gram",
        )
