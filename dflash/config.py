"""What a DFlash drafter is: the one frozen config, read from and written to `config.json`.

The file follows the layout that SGLang and z-lab's checkpoints share: backbone fields of a Qwen3
model at the top level, DFlash's own keys in `dflash_config`. Values are checked here once; inside
the library nobody checks them again.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from .fp8 import Quantization
from .rope import check_rope_parameters, read_rope
from .unsupported import refuse_unsupported

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
MAX_DEPTH = 50  # of JSON objects and lists in each other
MAX_LAYERS, MAX_SIZE = 1000, 2**31 - 1  # beyond them a number is a slip, and a shape overflows


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
    quantization: Quantization | None = None

    architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)  # the first is written
    required_keys: ClassVar[tuple[str, ...]] = (
        "block_size",
        "target_layer_ids",
        "mask_token_id",
        "num_target_layers",
    )

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
        check_rope_parameters(self.rope_parameters)
        _check_quantization(self)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens a block proposes: every slot but the anchor's."""
        return self.block_size - 1

    @property
    def first_slot(self) -> int:
        """The block slot that drafts the first token: the one after the anchor."""
        return 1

    @property
    def num_features(self) -> int:
        """Width of a context feature: the chosen layers' hidden states side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The content of `config.json`.

        `dtype` is that of the weights beside it ("float32", "bfloat16"), FP8 ones left aside.
        """
        return {
            "architectures": [self.architectures[0]],
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
            **self._own_keys(),
            **({"quantization_config": self.quantization.to_json()} if self.quantization else {}),
            "dtype": dtype,
        }

    def _own_keys(self) -> dict[str, Any]:
        """What of `config.json` belongs to the algorithm."""
        return {
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
                "input_embedding_scale": self.input_embedding_scale,
            }
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], *, where: str = "config.json") -> Self:
        """Read our own or a published `config.json`; nested `dflash_config` wins over the top.

        Raises ValueError that names the key for anything missing, ambiguous or not supported.
        """
        if data.get("speculators_model_type"):
            raise ValueError(
                f"{where} is a speculators checkpoint (layer ids are stored one higher there); it "
                "has to be converted first"
            )
        found = data.get("architectures") or []
        if not isinstance(found, list) or not any(name in found for name in cls.architectures):
            raise ValueError(
                f"{where}: architectures is {found}, expected [{cls.architectures[0]!r}]"
            )
        own = {**data, **_nested(data, where)}
        missing = [k for k in (*BACKBONE_KEYS, *cls.required_keys) if own.get(k) is None]
        if missing:
            raise ValueError(
                f"{where} lacks {', '.join(missing)}; a drafter cannot be read without guessing "
                "them"
            )
        _check_types(own, where)
        _check_layer_types(own, where)
        return cls(
            **{key: own[key] for key in BACKBONE_KEYS},
            block_size=own["block_size"],
            target_layer_ids=tuple(own["target_layer_ids"]),
            num_target_layers=own["num_target_layers"],
            mask_token_id=own["mask_token_id"],
            rope_parameters=read_rope(data, where=where),
            is_causal=own.get("is_causal") or False,
            input_embedding_scale=float(own.get("input_embedding_scale", 1.0)),
            quantization=Quantization.from_json(data.get("quantization_config"), where),
            **cls._read_own(own, where),
        )

    @classmethod
    def _read_own(cls, own: dict[str, Any], where: str) -> dict[str, Any]:
        """The algorithm's own fields; ValueError for a drafter of another algorithm."""
        if own.get("markov_rank") is not None:
            raise ValueError(
                f"{where} has markov_rank: its slots predict one token later than DFlash's; read "
                "it as DSpark"
            )
        return {}

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read `directory/config.json`; FileNotFoundError names the file when there is none.

        Raises ValueError as `from_json`, and for a network that is not computed here.
        """
        data, where = read_config(directory), str(Path(directory) / "config.json")
        config = cls.from_json(data, where=where)
        refuse_unsupported({**data, **_nested(data, where)}, where)
        return config


def read_config(directory: str | Path) -> dict[str, Any]:
    """The object in `directory/config.json`; FileNotFoundError or ValueError without one."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no drafter at {directory}: it has no config.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object, found {type(data).__name__}")
    if is_deep(data):
        raise ValueError(f"{path}: nested more than {MAX_DEPTH} levels deep, as no config.json is")
    return data


def is_deep(value: Any) -> bool:
    """Whether a JSON value is nested so deep that walking it, or printing it, might not end."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def _nested(data: dict[str, Any], where: str) -> dict[str, Any]:
    """`dflash_config`, which must not contradict the top level."""
    nested = data.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"{where}: dflash_config is {nested!r}, expected an object")
    for key in sorted(nested.keys() & data.keys()):
        if data[key] is not None and data[key] != nested[key]:
            raise ValueError(
                f"{where}: {key} is {data[key]!r} at the top and {nested[key]!r} in "
                "dflash_config; keep the one trained with"
            )
    return nested


def check_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
    """Layer ids rise strictly and stay within 0..L-2.

    Engines cannot capture the last layer's output.
    """
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_target_layers - 2:
        raise ValueError(
            f"target_layer_ids {list(ids)} must rise strictly within 0..{num_target_layers - 2} "
            f"(the target has {num_target_layers} layers and the last one cannot be captured)"
        )


def _check_types(own: dict[str, Any], where: str) -> None:
    """Whole numbers are whole, flags are flags: `"4"` or `"false"` would mean something else."""
    sizes = [key for key in BACKBONE_KEYS if key != "rms_norm_eps"]
    for key in (*sizes, "block_size", "mask_token_id", "num_target_layers"):
        value = own[key]
        if type(value) is not int or value < (0 if key == "mask_token_id" else 1):
            raise ValueError(f"{where}: {key} is {value!r}, expected a positive whole number")
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if value > most:
            raise ValueError(f"{where}: {key} is {value}, expected at most {most}")
    ids = own["target_layer_ids"]
    if not isinstance(ids, list) or any(type(k) is not int for k in ids):
        raise ValueError(f"{where}: target_layer_ids is {ids!r}, expected a list of layer numbers")
    for key in ("rms_norm_eps", "input_embedding_scale"):
        value = own.get(key, 1.0)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{where}: {key} is {value!r}, expected a number above 0")
    if not isinstance(own.get("is_causal"), bool | None):
        raise ValueError(f"{where}: is_causal is {own['is_causal']!r}, expected true or false")


def _check_quantization(config: DFlashConfig) -> None:
    obstacle = config.quantization and config.quantization.obstacle(
        hidden=config.hidden_size,
        heads=config.num_attention_heads * config.head_dim,
        kv_heads=config.num_key_value_heads * config.head_dim,
        inner=config.intermediate_size,
    )
    if obstacle:
        raise ValueError(obstacle)


def _check_layer_types(own: dict[str, Any], where: str) -> None:
    layer_types = own.get("layer_types") or []
    if not isinstance(layer_types, list) or len(layer_types) not in (0, own["num_hidden_layers"]):
        raise ValueError(
            f"{where}: layer_types is {layer_types!r}, expected one for each of "
            f"{own['num_hidden_layers']} layers"
        )
