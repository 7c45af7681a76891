"""What a card takes from files that anybody may have written: no crash, no markup, no leaks."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from test_export_card import RECORD, SOURCE, dflash, group, record, report, section
from toy_drafter import edit

from spec.export.card import make_card
from spec.export.card_record import plain, public

assert dflash  # a fixture
EVIL = "evil\n## Injected\n<script>x</script> | y `z` ```\n---\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/john doe/private/p.jsonl", "p.jsonl"),
        ("from /home/john doe/private/p.jsonl", "from p.jsonl"),
        ("C:/Users/Bob/x", "x"),
        ("in C:/Users/Bob/x", "in x"),
        (r"\\server\share\f", "f"),
        ("//server/share/f", "f"),
        ("~bob/secret/f", "f"),
        ("of ~bob/secret/f", "of f"),
        ("prompts=/srv/a/b.jsonl", "prompts=b.jsonl"),
        ("key:/srv/a/b", "key:b"),
        ("x-/srv/a/b", "x-b"),
        ('{"p":"/srv/a/b"}', '{"p":"b"}'),
        ("file:///srv/a/b", "b"),
        ("https://host.example/a/b?token=hf_x&c=d", "https://host.example/a/b"),
        ("s3://KEY:SECRET@bucket/a", "s3://bucket/a"),
        ("Org/Model-1B and/or 1 / 2", "Org/Model-1B and/or 1 / 2"),
    ],
)
def test_public_text_and_public_keys(value: str, shown: str) -> None:
    assert public(value) == shown
    assert public({value: [value]}) == {shown: [shown]}


def test_a_private_key_hides_no_other() -> None:
    assert public({"/home/a/all": 1, "all": 2}) == {"all'": 1, "all": 2}


def test_plain_text_is_one_line_without_markup() -> None:
    assert plain("a\n# b <i> | `c`  [d](e) & f") == (
        "a # b &lt;i> &#124; &#96;c&#96; &#91;d](e) &amp; f"
    )


def test_nothing_in_the_files_is_markup(dflash: Path) -> None:
    edit(dflash, rope_parameters={"rope_theta": 50000.0, "rope_type": "default", EVIL: EVIL})
    own = report("dflash", 3, target=EVIL, dtype=EVIL, engine=EVIL, schedule=EVIL)
    own["groups"][EVIL] = group(2.0, 5)
    record(
        dflash,
        target={"name": EVIL, "revision": EVIL},
        versions={EVIL: EVIL},
        recipe={"data": {"prompts": [EVIL]}, "note": f"a\n{'`' * 5}\n# Injected\n"},
        training_data={"sources": [{**SOURCE, "kind": EVIL, "names": [EVIL]}]},
        acceptance_report={**own, "comparisons": [{**own, "draft": EVIL}]},
    )
    text = make_card(dflash).text
    assert ModelCard(text).data.to_dict()["library_name"] == "sglang"
    below = text.split("\n---\n", 1)[1].partition("## Recipe")
    outside, yaml = below[0], section(text, "Recipe")
    assert "Injected" in outside and "\n## Injected" not in outside
    for line in outside.splitlines():
        assert "<script>" not in "".join(line.split("`")[::2]), line
    fence = "`" * 6
    assert yaml.count(f"\n{fence}") == 2 and "# Injected" in yaml.split(fence)[1]
    assert "```bash" in outside and "evil" not in outside.split("```bash")[1].split("```")[0]


CRASHES: list[tuple[dict[str, Any], str]] = [
    ({"data": "x"}, "data is 'x', expected an object"),
    ({"data": {"a": None}}, "data.a is null, expected an object"),
    ({"versions": "x"}, "versions is 'x', expected an object"),
    ({"versions": {"a": 1}}, "versions.a is 1, expected text"),
    ({"step": "last"}, "step is 'last', expected a whole number"),
    ({"heldout_acceptance_length": float("nan")}, "is nan, expected a number"),
    ({"recipe": {"data": [1]}}, "recipe.data is [1], expected an object"),
    ({"recipe": {"data": {"rows": [[1]]}}}, "recipe.data.rows.0 is [1], expected text"),
    ({"training_data": {"sources": "x"}}, "training_data.sources is 'x', expected a list"),
    ({"training_data": {"sources": [None]}}, "training_data.sources is [None], expected a list"),
    ({"training_data": {"longest_sequence": []}}, "longest_sequence is [], expected a whole"),
    ({"training_data": {"sources": [{"tags": {"a": None}}]}}, "sources.0.tags.a is null"),
    ({"target": {"name": True}}, "target.name is True, expected text"),
    ({"target": "x" * 100}, "expected an object; restore it"),
]


@pytest.mark.parametrize(("changes", "said"), CRASHES)
def test_another_type_is_one_line(dflash: Path, changes: dict[str, Any], said: str) -> None:
    record(dflash, **changes)
    with pytest.raises(ValueError, match=r"spec\.json: ") as refused:
        make_card(dflash)
    assert said in str(refused.value) and len(str(refused.value)) < 300


def test_what_is_not_stated_is_not_recorded(dflash: Path) -> None:
    record(dflash, training_data={"sources": [{}, {"kind": "answers"}]})
    assert "not recorded" in section(make_card(dflash).text, "Training data")
    for data in ({}, {"answers-0.manifest.json": {}}, None):
        record(dflash, training_data=None, data=data)
        assert "ot recorded" in section(make_card(dflash).text, "Training data")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100, "[]", "{"])
def test_a_record_of_another_shape_is_one_line(dflash: Path, text: str) -> None:
    (dflash / "spec.json").write_text(text)
    with pytest.raises(ValueError, match=r"spec\.json(:| is no JSON)"):
        make_card(dflash)


WHOLE = group(2.5, 300)
ODD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": None}, "temperature is null"),
    ({"schedule": 5}, "schedule is 5, expected text"),
    ({"groups": {"all": None}}, "groups.all is null"),
    ({"groups": {"all": {**WHOLE, "acceptance_length": "x"}}}, "acceptance_length is 'x'"),
    ({"groups": {"all": {**WHOLE, "acceptance_length_ci95": None}}}, "2.5 None, expected numbers"),
    ({"groups": {"all": {**WHOLE, "acceptance_length_ci95": [2.6, 2.4]}}}, "ends before it begins"),
    ({"groups": {"all": {**WHOLE, "num_rounds": None}}}, "groups.all.num_rounds is null"),
    ({"comparisons": [{"draft": "x"}]}, "a compared drafter without num_draft_tokens"),
    ({"comparisons": "x"}, "comparisons is 'x', expected a list"),
]


@pytest.mark.parametrize(("changes", "said"), ODD)
def test_a_report_of_other_types_is_one_line(
    dflash: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report("dflash", 3, **changes)))
    with pytest.raises(ValueError, match=r"report\.json: ") as refused:
        make_card(dflash, reports=[path])
    assert said in str(refused.value)
    # Nobody asked for spec.json's own.
    record(dflash, acceptance_report=report("dflash", 3, **changes))
    assert "Not measured" in make_card(dflash).text or "On held-out" in make_card(dflash).text


def test_a_card_needs_a_block_that_drafts(dflash: Path) -> None:
    edit(dflash, block_size="4", dflash_config={"target_layer_ids": [1, 3], "mask_token_id": 63})
    with pytest.raises(ValueError, match="block_size is None, which drafts nothing"):
        make_card(dflash)


def test_the_record_that_tests_share_has_the_types(dflash: Path) -> None:
    assert RECORD["target"]["name"] in make_card(dflash).text
