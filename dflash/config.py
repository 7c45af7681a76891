"""What a DFlash drafter is: the one frozen config, read from and written to `config.json`.

The file follows the layout that SGLang and z-lab's checkpoints share: backbone fields of a Qwen3
model at the top level, DFlash's own keys in `dflash_config`. Values are checked here once; inside
the library nobody checks them again.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ARCHITECTURE = "DFlashDraftModel"
BACKBONE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a drafter.

    `block_size` counts the input positions of a block, the anchor included. `target_layer_ids` name
    decoder layers whose output is read, counted from 0. `rope_parameters` is the drafter's own
    RoPE, complete and explicit.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    rope_parameters: dict[str, Any]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    is_causal: bool = False
    input_embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size}; a block holds the anchor and at least one "
                "drafted token: use 2 or more"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not divide into "
                f"{self.num_key_value_heads} key-value heads"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is no row of the target's embedding "
                f"(0..{self.vocab_size - 1}); "
                "`spec inspect TARGET` lists free ones"
            )
        _check_rope(self.rope_parameters)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens a block proposes: every slot but the anchor's."""
        return self.block_size - 1

    @property
    def num_features(self) -> int:
        """Width of a context feature: the chosen layers' hidden states side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The content of `config.json`.

        `dtype` is that of the weights beside it ("float32", "bfloat16").
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            **{key: getattr(self, key) for key in BACKBONE_KEYS},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "is_causal": self.is_causal,
            # Both spellings: engines with transformers 5 read the nested form, older ones the flat
            # key.
            "rope_parameters": self.rope_parameters,
            "rope_theta": self.rope_parameters["rope_theta"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
                "input_embedding_scale": self.input_embedding_scale,
            },
            "dtype": dtype,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], *, where: str = "config.json") -> "DFlashConfig":
        """Read our own or z-lab's `config.json`; nested `dflash_config` wins over the top level.

        Raises ValueError that names the key for anything missing, ambiguous or not supported.
        """
        if data.get("speculators_model_type"):
            raise ValueError(
                f"{where} is a speculators checkpoint (layer ids are stored one higher there); it "
                "has to be converted first"
            )
        architectures = data.get("architectures") or []
        if ARCHITECTURE not in architectures:
            raise ValueError(
                f"{where}: architectures is {architectures}, expected [{ARCHITECTURE!r}]"
            )
        own = {**data, **(data.get("dflash_config") or {})}
        missing = [
            key
            for key in (
                *BACKBONE_KEYS,
                "block_size",
                "target_layer_ids",
                "mask_token_id",
                "num_target_layers",
            )
            if own.get(key) is None
        ]
        if missing:
            raise ValueError(
                f"{where} lacks {', '.join(missing)}; a drafter cannot be read without guessing "
                "them"
            )
        _refuse_unsupported(own, where)
        return cls(
            **{key: own[key] for key in BACKBONE_KEYS},
            block_size=own["block_size"],
            target_layer_ids=tuple(own["target_layer_ids"]),
            num_target_layers=own["num_target_layers"],
            mask_token_id=own["mask_token_id"],
            rope_parameters=read_rope(data, where=where),
            is_causal=bool(own.get("is_causal", False)),
            input_embedding_scale=float(own.get("input_embedding_scale", 1.0)),
        )

    @classmethod
    def load(cls, directory: str | Path) -> "DFlashConfig":
        """Read `directory/config.json`; FileNotFoundError names the file when there is none."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"no drafter at {directory}: it has no config.json")
        return cls.from_json(json.loads(path.read_text()), where=str(path))

    def with_block_size(self, block_size: int) -> "DFlashConfig":
        """The same drafter proposing blocks of another size (the weights do not depend on it)."""
        return replace(self, block_size=block_size)


def check_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
    """Layer ids rise strictly and stay within 0..L-2.

    Engines cannot capture the last layer's output.
    """
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_target_layers - 2:
        raise ValueError(
            f"target_layer_ids {list(ids)} must rise strictly within 0..{num_target_layers - 2} "
            f"(the target has {num_target_layers} layers and the last one cannot be captured)"
        )


def read_rope(data: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The RoPE of a config.

    `rope_parameters`, or flat `rope_theta` with optional `rope_scaling`, never both at odds.
    """
    nested = data.get("rope_parameters")
    flat = data.get("rope_theta")
    if nested is None:
        if flat is None:
            raise ValueError(
                f"{where} states no RoPE: write rope_parameters (rope_theta, rope_type)"
            )
        scaling = dict(data.get("rope_scaling") or {})
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        scaling.pop("rope_type", None)
        return {"rope_type": kind, "rope_theta": flat, **scaling}
    if flat is not None and flat != nested.get("rope_theta", flat):
        raise ValueError(
            f"{where}: rope_theta is {flat} but rope_parameters says {nested['rope_theta']}; keep "
            "the one trained with"
        )
    rope = {"rope_type": "default", **nested}
    if flat is not None:
        rope.setdefault("rope_theta", flat)
    if data.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", data["partial_rotary_factor"])
    return rope


def _check_rope(rope: dict[str, Any]) -> None:
    if "rope_theta" not in rope or rope.get("rope_type") not in ROPE_TYPES:
        raise ValueError(
            f"rope_parameters {rope} need a rope_theta and a rope_type of {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {rope['partial_rotary_factor']}: engines rotate a drafter's "
            "whole head, "
            "so such a drafter would be served wrongly"
        )


def _refuse_unsupported(own: dict[str, Any], where: str) -> None:
    layer_types = own.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise ValueError(
            f"{where}: layer_types {sorted(set(layer_types))}; only full_attention is supported"
        )
    if own.get("attention_bias"):
        raise ValueError(f"{where}: attention_bias is not supported")
    if own.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {own['hidden_act']!r} is not supported, only silu")
    if own.get("markov_rank") is not None:
        raise ValueError(
            f"{where} has markov_rank: its slots predict one token later than DFlash's; read it "
            "as DSpark"
        )
