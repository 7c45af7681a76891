"""spec check on drafters that an engine loads and spec does not, or that say less than they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_export_check import Q_NORM, make, rewrite, speculators, without
from toy_drafter import dspark_config, edit, saved

from spec.export.check import check
from spec.export.checkpoint import read
from spec.export.findings import Engine


def test_a_draft_vocabulary_of_its_own_is_right_for_vllm_alone(tmp_path: Path) -> None:
    folder = speculators(tmp_path / "vllm", draft_vocab_size=32)
    own = {"lm_head.weight": torch.zeros(32, 32), "d2t": torch.arange(32)}
    rewrite(folder, lambda t: {**t, **own, "t2d": torch.ones(64)})
    (told,) = check(folder, engine="vllm").findings
    assert (told.severity, told.engine) == ("warning", "spec")
    assert "draft_vocab_size is 32 of 64; spec reads only" in told.what
    assert any("with the target's whole head" in line for line in defects(folder))
    with pytest.raises(ValueError, match="draft_vocab_size is 32 of 64"):
        read(folder)
    # Names and shapes are looked at all the same.
    rewrite(folder, without(Q_NORM))
    rewrite(folder, lambda t: {**t, "d2t": torch.arange(31)})
    said = " ".join(defects(folder, engine="vllm"))
    assert f"missing: {Q_NORM}" in said and "d2t is [31], expected [32]" in said
    rewrite(folder, without("d2t"))
    assert any("no d2t says which" in f.what for f in check(folder, engine="vllm").findings)


def defects(folder: Path, engine: Engine = "sglang") -> list[str]:
    return [f.what for f in check(folder, engine=engine).findings if f.severity == "defect"]


def test_what_only_spec_cannot_compute_is_a_warning(tmp_path: Path) -> None:
    folder = make(tmp_path / "draft")
    edit(folder, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    (told,) = check(folder).findings
    assert (told.severity, told.engine) == ("warning", "spec")
    edit(folder, layer_types=["banana", "full_attention"])
    assert "layer_types has 'banana', which SGLang refuses" in defects(folder)
    edit(folder, layer_types=["full_attention"] * 2, hidden_act="swigluoai")
    assert not defects(folder) and check(folder).findings
    edit(folder, hidden_act="gelu")
    assert "hidden_act is 'gelu', which SGLang refuses" in defects(folder)


def test_biases_of_attention_belong_to_the_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "draft")
    edit(folder, attention_bias=True)
    name = "layers.{}.self_attn.{}_proj.bias"
    (missing,) = defects(folder)
    assert missing.startswith("missing: " + name.format(0, "q")) and "and 4 more" in missing
    rows = {
        k.replace(".weight", ".bias"): torch.zeros(v.shape[0])
        for k, v in load_file(folder / "model.safetensors").items()
        if "self_attn" in k and "_proj" in k
    }
    rewrite(folder, lambda t: {**t, **rows})
    assert not defects(folder)
    rewrite(folder, lambda t: {**t, name.format(1, "o"): torch.zeros(3)})
    assert defects(folder) == [
        "shapes differ from config.json: layers.1.self_attn.o_proj.bias is [3], expected [32]"
    ]
    edit(folder, attention_bias=False)
    assert any("unexpected" in each for each in defects(folder))


@pytest.mark.parametrize("with_markov", [True, False])
def test_an_unsaid_confidence_head_is_told_by_its_width(tmp_path: Path, with_markov: bool) -> None:
    folder = saved(tmp_path / "d", dspark_config(confidence_head_with_markov=with_markov))
    edit(folder, confidence_head_with_markov=None)
    (told,) = check(folder).findings
    word = str(with_markov).lower()
    assert f"is not stated; the weights say {word}" in told.what
    assert told.severity == ("warning" if with_markov else "defect")
    assert ("SGLang takes it for true" in told.what) is not with_markov


def test_over_how_many_ranks_a_drafter_can_be_spread(tmp_path: Path) -> None:
    folder = make(tmp_path / "draft")
    edit(folder, num_attention_heads=8, num_key_value_heads=2, intermediate_size=48)
    assert check(folder).facts["tensor_parallel"] == [1, 2, 4, 8]
    edit(folder, intermediate_size=36)
    assert check(folder).facts["tensor_parallel"] == [1, 2, 4]
    edit(folder, num_key_value_heads=3)
    assert check(folder).facts["tensor_parallel"] == [1]
    edit(folder, head_dim=None)
    assert check(folder).facts["tensor_parallel"] is None
