"""Keys of a config.json that make another network, and keys that nobody here knows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_layouts import CONFIGS, WRITTEN, carried, tensors_of
from toy_drafter import dflash_config, dspark_config, edit, saved
from typer.testing import CliRunner

from spec.cli.main import app
from spec.dflash.draft import DFlashDraft
from spec.dflash.unsupported import NEUTRAL
from spec.export.check import check
from spec.export.checkpoint import read, write
from spec.export.convert import dropped, export_draft, import_draft
from spec.export.layouts import LAYOUTS, LayoutName
from spec.recipes.algorithms import load_draft

GOLDEN = Path(__file__).parent / "golden"
CHANGED: dict[str, Any] = {
    "use_gemma_norm": True,
    "rope_is_neox_style": False,
    "is_neox_style": False,
    "attention_value_scale": 0.612,
    "attention_sink_bias": True,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 30.0,
    "projector_type": "domino",
    "shift_label": True,
    "conv_kernel_size": 4,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
    "dspark_config": {"mask_token_id": 3},
    "dspark_block_size": 4,
    "dspark_markov_rank": 8,
    "dspark_markov_head_type": "vanilla",
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [1, 3],
}


def nest(folder: Path, **changes: Any) -> None:
    own = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, dflash_config={**own, **changes})


def test_each_key_is_tried() -> None:
    assert CHANGED.keys() == NEUTRAL.keys()


@pytest.mark.parametrize("place", [edit, nest])
@pytest.mark.parametrize("key", NEUTRAL)
def test_another_network_is_not_read_and_spec_check_warns(
    tmp_path: Path, key: str, place: Any
) -> None:
    place(saved(tmp_path / "in"), **{key: CHANGED[key]})
    for look in (DFlashDraft.load, read):
        with pytest.raises(ValueError, match=f"{key} .* would make another network"):
            look(tmp_path / "in")
    with pytest.raises(ValueError, match="another network"):
        import_draft(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = check(tmp_path / "in")
    assert not report.has_defect
    (found,) = report.findings
    assert (found.severity, found.engine) == ("warning", "spec")
    assert f"{key} {CHANGED[key]!r}: SGLang computes another network" in found.what
    assert "evaluate it in the engine" in found.cure
    # Where the key says what is computed anyway, nothing is said.
    for neutral in (NEUTRAL[key], None):
        place(tmp_path / "in", **{key: neutral})
        assert check(tmp_path / "in").findings == []
        assert read(tmp_path / "in").config == dflash_config()


def test_tensors_of_another_network_are_not_called_superfluous(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    save_file({**load_file(path), "prefix_gru.weight": torch.zeros(2)}, path)
    assert check(tmp_path).has_defect
    nest(tmp_path, projector_type="domino")
    assert [(each.severity, each.engine) for each in check(tmp_path).findings] == [
        ("warning", "spec")
    ]


def test_a_dspark_drafter_is_held_to_the_same(tmp_path: Path) -> None:
    edit(saved(tmp_path, dspark_config()), dspark_noise_token_id=3)
    with pytest.raises(ValueError, match="dspark_noise_token_id 3 would make another network"):
        load_draft(tmp_path)


@pytest.mark.parametrize("nested", [True, False])
def test_a_key_that_translation_would_lose(tmp_path: Path, nested: bool) -> None:
    config = dflash_config()
    write(config, tensors_of(config), tmp_path / "in", LAYOUTS["vllm"], target_name="toy")
    layers = json.loads((tmp_path / "in" / "config.json").read_text())["transformer_layer_config"]
    change = {"use_gemma_norm": True}
    edit(tmp_path / "in", **({"transformer_layer_config": layers | change} if nested else change))
    with pytest.raises(ValueError, match="use_gemma_norm True would make another network"):
        read(tmp_path / "in")
    told = [each.what for each in check(tmp_path / "in", engine="vllm").findings]
    assert [what for what in told if what.startswith("use_gemma_norm True")]


def test_layers_that_slide_without_a_word(tmp_path: Path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    edit(saved(tmp_path), layer_types=None, **sliding)
    with pytest.raises(ValueError, match="use_sliding_window without layer_types"):
        read(tmp_path)
    report = check(tmp_path)
    assert not report.has_defect and "use_sliding_window" in report.findings[0].what
    # The keys of a published Qwen3: from layer 28 on, which a drafter does not have.
    edit(tmp_path, max_window_layers=28)
    assert read(tmp_path) and check(tmp_path).findings == []
    edit(tmp_path, max_window_layers=0, layer_types=["full_attention"] * 2)
    assert read(tmp_path) and check(tmp_path).findings == []


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    edit(saved(tmp_path / "in"), residual_scale=0.5, nothing=None, use_cache=True)
    nest(tmp_path / "in", gate="tanh")
    report = import_draft(tmp_path / "in", tmp_path / "out")
    (found,) = report.findings
    assert found.severity == "warning"
    assert "residual_scale, dflash_config.gate (of the" in found.what
    found = export_draft(tmp_path / "in", tmp_path / "zlab", "zlab").findings
    assert any("residual_scale, dflash_config.gate" in each.what for each in found)
    arguments = ["import", str(tmp_path / "in"), "--out", str(tmp_path / "again")]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "warning (all): left out, for spec does not know them: residual_scale" in shown


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
def test_no_layout_of_ours_has_a_key_that_nobody_knows(file: Path) -> None:
    assert dropped(json.loads(file.read_text())) == []


@pytest.mark.parametrize(("kind", "name"), WRITTEN)
def test_nothing_is_said_of_what_was_written_here(
    tmp_path: Path, kind: str, name: LayoutName
) -> None:
    config = CONFIGS[kind]
    tensors = tensors_of(config, torch.bfloat16)
    theirs = {k: v.bfloat16() for k, v in (carried(name) or {}).items()} or None
    write(config, tensors, tmp_path / "in", LAYOUTS[name], target_name="toy", carried=theirs)
    whats = [each.what for each in check(tmp_path / "in", engine=name).findings]
    assert not [what for what in whats if "network" in what or "RoPE" in what]
    whats = [each.what for each in import_draft(tmp_path / "in", tmp_path / "out").findings]
    assert not [what for what in whats if "left out" in what]


def test_ordinary_keys_of_a_published_config_are_no_news() -> None:
    published = {
        "_name_or_path": "x",
        "architectures": ["DFlashDraftModel"],
        "auto_map": {},
        "bos_token_id": 1,
        "eos_token_id": [2],
        "initializer_range": 0.02,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
    }
    assert dropped(published) == []
