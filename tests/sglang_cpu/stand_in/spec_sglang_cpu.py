"""Plugin, for tests only: SGLang 0.5.23 drafts on a CPU with DFLASH and DSPARK.

SGLang finds it by its entry point (group `sglang.srt.plugins`) and calls `activate` in every
process before a model is made. Each function below mends one place that takes a GPU for granted,
and changes nothing that decides which tokens are drafted or kept.
"""

import __future__

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALED = 1e-12


def activate() -> None:
    streams_are_not_recorded()
    arguments_allow_a_cpu()
    native_attention_verifies_blocks()
    accepted_rows_are_copied()
    fused_gpu_paths_are_off()
    embeddings_keep_their_dtype()
    fp8_in_plain_torch()


def streams_are_not_recorded() -> None:
    """A CPU tensor has no stream to be recorded on."""
    record = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record(self, stream)

    torch.Tensor.record_stream = record_stream


def arguments_allow_a_cpu() -> None:
    """The argument checks of both algorithms name their devices; the CPU joins them."""
    from sglang.srt.arg_groups import choices, speculative_hook

    if "torch_native" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")
    npu_or_xpu = 'cfg.device == "npu" or cfg.device == "xpu"'
    rewrite(speculative_hook, "_handle_dflash", npu_or_xpu, f'{npu_or_xpu} or cfg.device == "cpu"')
    rewrite(speculative_hook, "_handle_dspark", '"npu", "xpu")', '"npu", "xpu", "cpu")')


def rewrite(module: ModuleType, function: str, old: str, new: str) -> None:
    """Compile a function of a module again with one piece of its source replaced."""
    source = inspect.getsource(getattr(module, function))
    assert old in source, f"{module.__name__}.{function} reads otherwise than in SGLang 0.5.23"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(old, new), str(module.__file__), "exec", flags=flags)
    exec(code, module.__dict__)


def native_attention_verifies_blocks() -> None:
    """A verify pass writes n more tokens a request; the batch's lengths do not count them yet."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    extend, attend = Backend.forward_extend, Backend._run_sdpa_forward_extend

    def forward_extend(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_unused: Any,
    ) -> Tensor:
        verifies = forward_batch.forward_mode.is_target_verify()
        self.block_tokens = forward_batch.spec_info.draft_token_num if verifies else None
        return extend(self, q, k, v, layer, forward_batch, save_kv_cache)

    def run(
        self: Any,
        query: Tensor,
        output: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        rows: Tensor,
        lengths: Tensor,
        before: Tensor,
        added: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        n = getattr(self, "block_tokens", None)
        if n is not None:
            before, added, lengths = lengths, torch.full_like(lengths, n), lengths + n
        cached = (keys, values, table, rows)
        return attend(self, query, output, *cached, lengths, before, added, *args, **options)

    Backend.forward_extend, Backend._run_sdpa_forward_extend = forward_extend, run


def accepted_rows_are_copied() -> None:
    """Write the first commit_lens[b] rows of each request's block; a Triton kernel on GPUs."""
    from sglang.srt.mem_cache import memory_pool

    def write(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        places: Tensor,
        commit_lens: Tensor,
        row_dim: int,
        store_dtype: torch.dtype,
    ) -> None:
        if not k.numel() or not places.numel():
            return
        kept = (torch.arange(places.shape[1]) < commit_lens[:, None]).flatten()
        goal = places.flatten()[kept]
        for rows, cache in ((k, k_cache), (v, v_cache)):
            shaped = rows.reshape(-1, *cache.shape[1:])
            cache[goal] = shaped[kept].to(cache.dtype)

    memory_pool._set_kv_buffer_prefix_valid_impl = write


def fused_gpu_paths_are_off() -> None:
    """Both have the unfused path beside them, which is plain torch."""
    from sglang.srt.models.dflash import DFlashAttention
    from sglang.srt.models.dspark import DSparkDraftMixin

    init = DFlashAttention.__init__

    def without_table_kernel(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.use_table_qk_norm_rope = False

    DFlashAttention.__init__ = without_table_kernel
    DSparkDraftMixin._build_fused_kv_write_bundle = lambda self, pool: None


def embeddings_keep_their_dtype() -> None:
    """SGLang casts the block's embeddings to bfloat16, which a float32 model cannot multiply."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    keywords = ModelRunner._extend_forward_kwargs

    def in_the_models_dtype(self: Any, forward_batch: Any, *args: Any) -> dict[str, Any]:
        made = keywords(self, forward_batch, *args)
        given = forward_batch.input_embeds
        if given is not None and forward_batch.replace_embeds is None:
            made["input_embeds"] = given.to(self.dtype)
        return made

    ModelRunner._extend_forward_kwargs = in_the_models_dtype


def fp8_in_plain_torch() -> None:
    """FP8 layers need AMX here: the same rounding, multiplied in float32.

    Weights are e4m3 times their scales, a scale an output channel (compressed-tensors) or a block
    of 128 x 128; activations are rounded to e4m3 with a scale a token or 128 values of it.
    """
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    def by_channel(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight.t().float() * layer.weight_scale
        return fp8_linear(x, weight, bias, group=x.shape[-1])

    def by_block(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, columns = self.quant_config.weight_block_size
        scales = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        height, width = layer.weight.shape
        return fp8_linear(x, layer.weight.float() * scales[:height, :width], bias, group=columns)

    channel = compressed_tensors.CompressedTensorsConfig
    channel._check_scheme_supported = lambda self, *args, **options: True
    schemes.CompressedTensorsW8A8Fp8.apply_weights = by_channel
    Fp8LinearMethod.process_weights_after_loading_block_quant = lambda self, layer: None
    Fp8LinearMethod.apply = by_block
    for config in (channel, Fp8Config):
        config.get_supported_act_dtypes = classmethod(
            lambda cls: [torch.bfloat16, torch.float16, torch.float32]
        )


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, group: int) -> Tensor:
    """x [..., in] rounded to e4m3 in groups of `group`, times weight [out, in]; in x's dtype."""
    grouped = x.float().unflatten(-1, (-1, group))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALED) / E4M3_MAX
    codes = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    product = (codes.float() * scale).flatten(-2) @ weight.t()
    return (product if bias is None else product + bias).to(x.dtype)
