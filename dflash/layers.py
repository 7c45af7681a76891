"""The parts of the DFlash network: norm, projections of attention, MLP, layer, rotary embedding.

Shapes: A blocks, K slots of a block, H hidden.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3 import Qwen3Config

from .config import DFlashConfig
from .fp8 import projection


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of a draft layer.

    The attention itself is in attention.py (training) and `DraftCache` (decoding).
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        hidden, fp8 = config.hidden_size, config.quantization
        self.q_proj = projection(fp8, "q_proj", hidden, width)
        self.k_proj = projection(fp8, "k_proj", hidden, kv_width)
        self.v_proj = projection(fp8, "v_proj", hidden, kv_width)
        self.o_proj = projection(fp8, "o_proj", width, hidden)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[..., H] -> rotated queries [..., heads, head_dim]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., H] -> rotated keys and values [..., kv_heads, head_dim]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(k, rope), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, inner, fp8 = config.hidden_size, config.intermediate_size, config.quantization
        self.gate_proj = projection(fp8, "gate_proj", hidden, inner)
        self.up_proj = projection(fp8, "up_proj", hidden, inner)
        self.down_proj = projection(fp8, "down_proj", inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer of the drafter."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """x [A, K, H]; `attend(q, k, v)` closes over this layer's context."""
        inner = self.input_layernorm(x)
        q = self.self_attn.query(inner, rope)
        k, v = self.self_attn.key_value(inner, rope)
        x = x + self.self_attn.o_proj(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, head_dim], halves layout (as in Llama and Qwen)."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rope_frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] (float32) and the attention factor, from JSON alone."""
    rope = config.rope_parameters
    exponent = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** exponent, 1.0
    # `load` builds the network on the meta device; these numbers are needed for real.
    with torch.device("cpu"):
        try:
            backbone = Qwen3Config(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(rope),
            )
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](backbone, device=torch.device("cpu"))
        except KeyError as error:
            raise ValueError(f"rope_parameters {rope} lack {error}") from None
