"""The model card: its facts, its counts, and what it must not replace or give away."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from toy_drafter import dflash_config, dspark_config, edit, saved

from spec.export.card import is_ours, make_card, public, stated_license, write_card
from spec.export.checkpoint import read, write
from spec.export.layouts import LAYOUTS, LayoutName

SOURCE = {
    "kind": "answers",
    "names": ["stdlib"],
    "num_rows": 830,
    "num_tokens": 120_000,
    "num_supervised": 80_676,
    "longest_row": 1200,
    "temperatures": [0.0],
    "tags": {
        "code": {"num_rows": 800, "num_supervised": 80_000},
        "prose": {"num_rows": 30, "num_supervised": 676},
    },
}
RECORD: dict[str, Any] = {
    "recipe": {
        "train": {"lr": 0.002},
        "data": {"rows": ["/home/me/secret/rows.jsonl"]},
        "wandb": {"entity": "mycompany"},
    },
    "training_data": {"longest_sequence": 512, "sources": [SOURCE]},
    "target": {"name": "Org/Model-1B", "revision": "abc123"},
    "step": 1120,
    "heldout_acceptance_length": 1.691,
    "versions": {"spec-toolkit": "0.1.0", "torch": "2.13.0"},
}


def group(length: float | None, rounds: int) -> dict[str, Any]:
    return {
        "num_requests": 4,
        "num_rounds": rounds,
        "acceptance_length": length,
        "acceptance_length_ci95": None if length is None else [length - 0.1, length + 0.1],
        "acceptance_rate": 0.25,
        "equal_to_plain": 1.0,
    }


def report(algorithm: str, drafts: int, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "target": "Org/Model-1B",
        "draft": "trained",
        "engine": "spec",
        "algorithm": algorithm,
        "num_draft_tokens": drafts,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "schedule": None,
        "dtype": "bfloat16",
        "max_new_tokens": 96,
        "groups": {"all": group(2.5, 300), "code": group(3.0, 100), "prose": group(2.0, 200)},
        **changes,
    }


def record(directory: Path, **changes: Any) -> None:
    (directory / "spec.json").write_text(json.dumps({**RECORD, **changes}))


@pytest.fixture
def dflash(tmp_path: Path) -> Path:
    directory = saved(tmp_path / "run" / "draft", dflash_config())
    record(directory, acceptance_report=report("dflash", 3))
    return directory


@pytest.fixture
def dspark(tmp_path: Path) -> Path:
    directory = saved(tmp_path / "dspark", dspark_config())
    record(directory, acceptance_report=report("dspark", 4))
    return directory


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def words(text: str, start: str) -> list[str]:
    """The words of the shell command that starts like this."""
    lines = text.replace("\\\n", " ").splitlines()
    return shlex.split(next(line for line in lines if line.startswith(start)))


def test_sglang_is_told_one_more_than_is_drafted(dflash: Path, dspark: Path) -> None:
    for directory, algorithm, count in ((dflash, "DFLASH", "4"), (dspark, "DSPARK", "5")):
        command = words(make_card(directory).text, "python -m sglang.launch_server")
        options = dict(zip(command[3::2], command[4::2], strict=True))
        assert options == {
            "--model-path": "Org/Model-1B",
            "--speculative-draft-model-path": "DRAFTER",
            "--speculative-algorithm": algorithm,
            "--speculative-num-draft-tokens": count,
            "--speculative-draft-model-quantization": "unquant",
        }


def test_vllm_is_told_what_is_drafted(dflash: Path, dspark: Path) -> None:
    for directory, method, count in ((dflash, "dflash", 3), (dspark, "dspark", 4)):
        text = make_card(directory).text
        command = words(text, "vllm serve")
        assert command[:4] == ["vllm", "serve", "Org/Model-1B", "--speculative-config"]
        assert json.loads(command[4]) == {
            "method": method,
            "model": "CONVERTED",
            "num_speculative_tokens": count,
        }
        assert words(text, "spec export")[2:] == (
            ["--draft", "DRAFTER", "--to", "vllm", "--out", "CONVERTED"]
        )


@pytest.mark.parametrize(("name", "converted"), [("zlab", False), ("vllm", True)])
def test_an_export_says_who_loads_it_as_it_is(
    dflash: Path, tmp_path: Path, name: LayoutName, converted: bool
) -> None:
    found = read(dflash)
    out = tmp_path / "made"
    write(found.config, found.tensors, out, LAYOUTS[name], target_name="Org/Other", beside=None)
    card = make_card(out)
    sglang, vllm = (words(card.text, start) for start in ("python -m", "vllm serve"))
    assert ("CONVERTED" in sglang) is converted
    assert ("spec import DRAFTER --out CONVERTED" in card.text) is converted
    assert json.loads(vllm[4])["model"] == ("DRAFTER" if converted else "CONVERTED")
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"
    assert json.loads(vllm[4])["num_speculative_tokens"] == 3
    # vLLM's layout names the target even without spec.json.
    assert card.metadata.get("base_model") == ("Org/Other" if converted else None)
    assert card.metadata["library_name"] == ("vllm" if converted else "sglang")


def test_heads_that_an_engine_has_not_are_told(tmp_path: Path) -> None:
    gated = saved(tmp_path / "gated", dspark_config(markov_head_type="gated"))
    assert "vLLM** has the vanilla Markov head only; this drafter's is gated" in (
        make_card(gated).text
    )
    none = dspark_config(markov_rank=0, confidence_head_with_markov=False)
    text = make_card(saved(tmp_path / "none", none)).text
    assert "SGLang** refuses it" in text and "sglang.launch_server" not in text


def test_calibration_is_offered_where_it_lies(dspark: Path, dflash: Path) -> None:
    assert "it is not calibrated" in make_card(dspark).text
    (dspark / "sts.json").write_text("{}")
    text = make_card(dspark).text
    assert "`--speculative-dspark-confidence-sts-path DRAFTER/sts.json`" in text
    assert "sps-table" not in text and "not calibrated" not in text
    assert "confidence head" not in make_card(dflash).text


def test_metadata_reads_back(dflash: Path) -> None:
    write_card(dflash, license="apache-2.0")
    found = ModelCard.load(dflash / "README.md").data
    assert isinstance(found, ModelCardData)
    assert found.base_model == "Org/Model-1B"
    assert (found.library_name, found.pipeline_tag) == ("sglang", "text-generation")
    assert found.license == "apache-2.0"
    assert found.tags == ["speculative-decoding", "dflash", "draft-model"]
    assert found.model_name == "Model-1B-DFlash"
    assert found.eval_results is not None
    assert [(r.dataset_config, r.metric_value) for r in found.eval_results] == [
        ("all", 2.5),
        ("prose", 2.0),
        ("code", 3.0),
    ]
    arguments = found.eval_results[0].metric_args
    assert arguments is not None and arguments["ci95"] == [2.4, 2.6]


def test_acceptance_data_and_limits_are_the_files(dflash: Path) -> None:
    text = make_card(dflash).text
    assert "| `code` | 4 | 100 | 3.00 [2.90, 3.10] | 25.0 % | 100.0 % |" in text
    assert "temperature 0, 3 draft tokens a round, at most 96 new tokens" in text
    data = section(text, "Training data")
    assert "| the target's answers to prompts | `stdlib` | 830 | 120,000 | 80,676 | 1,200 |" in data
    assert "| `code` | 800 | 80,000 |" in data
    limits = section(text, "Limits")
    assert "sequences of at most 512 tokens" in limits
    assert "were sampled at 0; acceptance measured at 0." in limits
    assert "weights are those of step 1120" in section(text, "Recipe")
    assert "Not stated. The drafter was trained" in section(text, "Licence")
    assert "| target | `Org/Model-1B` |" in section(text, "Target")


def test_what_no_file_says_is_unknown(tmp_path: Path) -> None:
    card = make_card(saved(tmp_path / "found", dflash_config()))
    assert not {"base_model", "license", "model-index", "language"} & card.metadata.keys()
    assert card.text.split("---\n")[2].startswith("\n# found\n")
    assert "a target that its files do not name" in card.text
    for title in ("Target", "Training data", "Recipe", "Limits"):
        assert "ot recorded" in section(card.text, title), title
    assert "Not measured." in section(card.text, "Acceptance")
    assert words(card.text, "spec export")[-2:] == ["--target", "TARGET"]


def test_an_older_record_has_its_manifests(dflash: Path) -> None:
    manifest = {"num_kept": 100, "num_tokens": 13276, "num_supervised": 8859}
    manifest |= {"options": {"temperature": 1.0}}
    record(
        dflash,
        training_data=None,
        data={"answers-0.manifest.json": manifest},
        recipe={
            "data": {"prompts": ["tiny"], "rows": ["log.jsonl"]},
            "train": {"seq_length": 256},
        },
    )
    text = make_card(dflash).text
    assert "| `tiny` | 100 | 13,276 | 8,859 | not recorded |" in text
    assert "| `log.jsonl` | not recorded | not recorded |" in text
    assert "sequences of at most 256 tokens" in text
    assert "were sampled at 1, that of others is not recorded;" in text


def test_a_directory_name_is_no_hub_id(dflash: Path) -> None:
    record(dflash, target={"name": "tiny", "revision": "0"})
    card = make_card(dflash)
    assert "base_model" not in card.metadata
    assert "`TARGET` is the target (tiny)" in card.text


def test_nothing_of_this_machine_or_of_accounts(dflash: Path) -> None:
    path = str(dflash.parent)
    record(
        dflash,
        target={"name": f"{path}/model", "revision": "0"},
        acceptance_report=report("dflash", 3, draft=f"{path}/draft", target=f"{path}/model"),
    )
    text = write_card(dflash).text
    assert path not in text and "/home" not in text and "mycompany" not in text
    assert "rows.jsonl" in text and "| target | `model` |" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/data/rows.jsonl", "rows.jsonl"),
        ("trained on ~/data/x.jsonl and ../y", "trained on x.jsonl and y"),
        (r"C:\data\x.jsonl", "x.jsonl"),
        ("file:///srv/x", "x"),
        ("Org/Model-1B", "Org/Model-1B"),
        ("and/or 1 / 2", "and/or 1 / 2"),
        ("https://me:secret@host.example/a/b", "https://host.example/a/b"),
    ],
)
def test_public_values(value: str, shown: str) -> None:
    assert public({"a": [value]}) == {"a": [shown]}


def test_the_same_again_and_never_over_a_hand(dflash: Path) -> None:
    readme = dflash / "README.md"
    write_card(dflash, license="mit")
    first = readme.read_bytes()
    write_card(dflash)  # the licence that somebody stated stays
    assert readme.read_bytes() == first
    readme.write_bytes(first.replace(b"\n", b"\r\n"))
    assert is_ours(readme)
    readme.write_bytes(first.replace(b"## Limits", b"## Limits, by me"))
    with pytest.raises(ValueError, match="written or changed by hand"):
        write_card(dflash)
    readme.write_text("---\nlicense: gpl-3.0\n---\n# Mine\n")
    assert stated_license(readme) == "gpl-3.0"
    with pytest.raises(ValueError, match="give --out, or --force"):
        write_card(dflash)
    assert "Mine" in readme.read_text()
    assert write_card(dflash, force=True).metadata["license"] == "gpl-3.0"
    assert is_ours(readme)


def test_reports_join_that_of_the_run_but_once(dflash: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    own = report("dflash", 3)
    others = [{**own, "draft": "ngram", "groups": {"all": group(1.7, 50)}}]
    path.write_text(json.dumps({**own, "comparisons": others}))
    text = make_card(dflash, reports=[path]).text
    assert text.count("Measured in bfloat16") == 1
    assert "| ngram | 3 | 1.70 [1.60, 1.80] |" in text
    path.write_text(json.dumps({**own, "temperature": 1.0, "target": "Model-1B"}))
    card = make_card(dflash, reports=[path])
    # The same model from a directory.
    assert "Measured on `Model-1B` in bfloat16 by `spec`: temperature 1, seed 0" in card.text
    assert "acceptance measured at 0, 1." in card.text


def test_a_report_of_another_drafter_is_refused(dflash: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for content, said in (
        (report("dspark", 3), "its algorithm is dspark, this one's is dflash"),
        (report("dflash", 7), "its num_draft_tokens is 7, this one's is 3"),
        (report("dflash", 3, target="Org/Tuned"), "is of another target: Org/Tuned, this"),
        (report("dflash", 3, groups={"all": group(4.2, 9)}), "expected numbers from 1 to 4"),
        ({"groups": {"all": {}}}, "no acceptance report"),
        (report("dflash", 3, groups={"all": {}}), "lacks acceptance_length"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            make_card(dflash, reports=[path])
    path.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        make_card(dflash, reports=[path])


def test_a_report_of_the_same_target_under_another_name_is_its_own(
    dflash: Path, tmp_path: Path
) -> None:
    """A run calls the target it made `tiny`; a verb that is given its directory, `target`."""
    revision = RECORD["target"]["revision"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report("dflash", 3, target="target", target_revision=revision)))
    assert "2.50" in make_card(dflash, reports=[path]).text
    path.write_text(json.dumps(report("dflash", 3, target="target", target_revision="another")))
    with pytest.raises(ValueError, match="is of another target: target, this"):
        make_card(dflash, reports=[path])


def test_a_report_of_spec_json_that_says_too_little_is_as_if_not_recorded(dflash: Path) -> None:
    own = report("dflash", 3)
    del own["schedule"]  # as older runs wrote it
    record(dflash, acceptance_report=own)
    assert "On held-out prompts while training: 1.69" in make_card(dflash).text
    (dflash / "spec.json").write_text("{")
    with pytest.raises(ValueError, match=r"spec.json is no JSON .*restore it"):
        make_card(dflash)


def test_a_group_without_rounds_has_no_result(dflash: Path) -> None:
    groups = {"all": group(None, 0), "code": group(None, 0)}
    record(dflash, acceptance_report=report("dflash", 3, groups=groups))
    card = make_card(dflash)
    assert "no rounds" in card.text and "model-index" not in card.metadata


@pytest.mark.parametrize("license", ["Apache 2.0", "MIT", ""])
def test_a_licence_is_an_id(dflash: Path, license: str) -> None:
    with pytest.raises(ValueError, match="expected an id as the hub lists them"):
        make_card(dflash, license=license)


def test_names_from_files_are_no_markup(dflash: Path) -> None:
    groups = {"all": group(2.0, 3), "a|b `<b>`": group(2.0, 2), "c": group(2.0, 1)}
    record(dflash, acceptance_report=report("dflash", 3, groups=groups))
    assert "| `a\\|b <b>` | 4 |" in make_card(dflash).text


def quantize(directory: Path) -> None:
    """As far as the card looks: eight-bit weights, and the config of 128 x 128 blocks."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path)
    edit(
        directory,
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    )


def test_an_fp8_drafter_says_so(dflash: Path) -> None:
    quantize(dflash)
    record(dflash, quantization={"from": "draft"}, acceptance_report=report("dflash", 3))
    card = make_card(dflash)
    assert "fp8" in card.metadata["tags"] and "# Model-1B-DFlash-FP8" in card.text
    assert "128 x 128" in section(card.text, "Drafter")
    # It has a quantization of its own, so it needs no word against the target's.
    assert "unquant" not in card.text
    assert "export the drafter that this one was quantized from" in card.text
    # What was measured before says nothing of it.
    assert "Not measured since it was quantized" in card.text
    assert "The drafter it was quantized from:" in card.text
    assert "model-index" not in card.metadata
    (dflash / "report.json").write_text(json.dumps(report("dflash", 3, dtype="float32")))
    card = make_card(dflash)
    assert "Not measured" not in card.text and "Measured in float32" in card.text
    assert "model-index" in card.metadata
