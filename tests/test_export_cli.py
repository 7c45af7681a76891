"""spec check, export and import on the command line, with a target beside the drafter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_layouts import edit
from typer.testing import CliRunner

from spec.cli.main import app
from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.target.files import target_revision
from spec.target.model import Target
from spec.target.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("export") / "toy", steps=1)


@pytest.fixture
def drafts(target: Path, tmp_path: Path) -> dict[str, Path]:
    loaded = Target.load(str(target))
    shape = {
        "hidden_size": loaded.hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": loaded.vocab_size,
        "block_size": 3,
        "target_layer_ids": (1, 2),
        "num_target_layers": loaded.num_layers,
        "mask_token_id": loaded.vocab_size - 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(0)
    DFlashDraft(DFlashConfig(**shape)).save(tmp_path / "dflash")
    heads = {"markov_rank": 4, "enable_confidence_head": True}
    DSparkDraft(DSparkConfig(**shape, **heads)).save(tmp_path / "dspark")
    return {name: tmp_path / name for name in ("dflash", "dspark")}


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def error(*arguments: object) -> str:
    """The message that `main` prints in one line before it leaves with 2."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ValueError | OSError), result.output
    return str(result.exception)


def test_check_a_good_pair(drafts: dict[str, Path], target: Path) -> None:
    shown = run("check", drafts["dflash"], "-t", target)
    assert "nothing wrong that the files show, for SGLang" in shown
    assert "block size         3" in shown
    told = json.loads(run("check", drafts["dspark"], "-t", target, "--json"))
    assert (told["algorithm"], told["num_draft_tokens"], told["findings"]) == ("dspark", 3, [])


def test_check_says_what_to_do_and_leaves_with_one(drafts: dict[str, Path]) -> None:
    edit(drafts["dflash"], dtype="float16")
    shown = run("check", drafts["dflash"], code=1)
    assert "defect (all): config.json says dtype float16, the weights are F32\n  -> write" in shown
    told = json.loads(run("check", drafts["dflash"], "--json", code=1))
    assert told["findings"][0]["severity"] == "defect"


def test_check_against_another_target(drafts: dict[str, Path], target: Path) -> None:
    config = json.loads((drafts["dflash"] / "config.json").read_text())
    own = {**config["dflash_config"], "mask_token_id": 5}
    edit(
        drafts["dflash"],
        num_target_layers=7,
        vocab_size=300,
        rope_theta=5e5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dflash_config=own,
    )
    (drafts["dflash"] / "spec.json").write_text('{"target": {"name": "other", "revision": "0"}}')
    told = json.loads(run("check", drafts["dflash"], "-t", target, "--json", code=1))
    said = {finding["what"]: finding["severity"] for finding in told["findings"]}
    revision = target_revision(target)
    assert said["the drafter's number of target layers is 7, that of toy is 5"] == "defect"
    assert said["the drafter's vocabulary is 300, that of toy is 272"] == "defect"
    assert said["rope_theta is 500000.0, the target's is 10000.0"] == "warning"
    assert said[f"trained for other (0), this target is toy ({revision})"] == "warning"
    assert any("which the target's tokenizer uses" in what for what in said)
    assert not any("hidden size" in what for what in said)


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    assert "has no config.json" in error("check", tmp_path)


@pytest.mark.parametrize("to", ["sglang", "zlab", "vllm"])
def test_dflash_there_and_back(
    drafts: dict[str, Path], target: Path, tmp_path: Path, to: str
) -> None:
    made = tmp_path / "made"
    shown = run("export", "-d", drafts["dflash"], "--to", to, "-o", made, "-t", target)
    assert "nothing wrong that the files show" in shown and "read back equal" in shown
    assert str(tmp_path) not in (made / "config.json").read_text()
    run("import", made, "-o", tmp_path / "back")
    for name in ("config.json", "model.safetensors"):
        original, back = (folder / name for folder in (drafts["dflash"], tmp_path / "back"))
        if name == "config.json":
            assert json.loads(original.read_text()) == json.loads(back.read_text())
        else:
            a, b = load_file(original), load_file(back)
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_deepspec_gets_the_targets_embedding_and_head(
    drafts: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    made, back = tmp_path / "made", tmp_path / "back"
    options = ("-d", drafts["dspark"], "--to", "deepspec", "-o", made)
    assert "give --target" in error("export", *options)
    assert not made.exists()
    run("export", *options, "-t", target)
    stored = load_file(made / "model.safetensors")
    loaded = Target.load(str(target))
    assert torch.equal(stored["embed_tokens.weight"], loaded.embedding)
    assert torch.equal(stored["lm_head.weight"], loaded.head)
    run("import", made, "-o", back, "-t", target)
    a, b = (load_file(folder / "model.safetensors") for folder in (drafts["dspark"], back))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    save_file(
        {**stored, "lm_head.weight": stored["lm_head.weight"] + 1}, made / "model.safetensors"
    )
    assert "another lm_head.weight" in error("import", made, "-o", tmp_path / "no", "-t", target)
    assert not (tmp_path / "no").exists()


def test_vllm_names_the_target(drafts: dict[str, Path], tmp_path: Path) -> None:
    options = ("-d", drafts["dflash"], "--to", "vllm", "-o", tmp_path / "made")
    assert "does not say which target it belongs to" in error("export", *options)
    (drafts["dflash"] / "spec.json").write_text('{"target": {"name": "who/what"}}')
    run("export", *options)
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "who/what"
    assert (tmp_path / "made" / "spec.json").exists()


def test_refusals_name_the_reason(drafts: dict[str, Path], target: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "made", "-t", target)
    assert "it is DSpark" in error("export", "-d", drafts["dspark"], "--to", "zlab", *out)
    assert "it is DFlash" in error("export", "-d", drafts["dflash"], "--to", "deepspec", *out)


def test_import_asks_for_what_is_left_out(
    drafts: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    shutil.copytree(drafts["dflash"], tmp_path / "published")
    edit(tmp_path / "published", dflash_config=None, num_target_layers=None)
    out = ("-o", tmp_path / "made")
    asked = error("import", tmp_path / "published", *out)
    assert "leaves out target_layer_ids, mask_token_id, num_target_layers" in asked
    given = ("--layer-ids", "1,2", "--mask-token-id", "271", "-t", target)
    run("import", tmp_path / "published", *out, *given)
    assert DFlashDraft.load(tmp_path / "made").config == DFlashDraft.load(drafts["dflash"]).config
    assert "--layer-ids is '1;2'" in error("import", drafts["dflash"], *out, "--layer-ids", "1;2")
