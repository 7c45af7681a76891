"""Load a frozen target and find the parts a drafter borrows.

Shapes: B batch, L sequence, H hidden, V vocabulary (rows of the embedding, padded rows included).

The parts are found by structure, not by model name: the module that owns the input embedding also
owns the decoder layers and the final norm. The modules themselves are called, so `(1 + w)` norms,
scaled embeddings and nested `text_config` wrappers need no special case.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .files import resolve
from .logits import head_logits, logit_scale, logit_softcap
from .saving import quiet_progress, refusal

REFUSALS = (ValueError, KeyError, OSError, ImportError, RuntimeError, SafetensorError)
NO_TEACHER = (
    "train on its tokens alone (loss.labels=hard; a dspark drafter with loss.l1=0, loss.renyi=0 "
    "and draft.confidence_head=false, too)"
)
LAYER_LISTS = ("layers", "h", "blocks")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")
RECURRENT_KINDS = ("linear", "mamba", "recurrent", "conv", "rwkv", "ssm", "delta", "lightning")
RECURRENT_MODULE = re.compile(
    r"mamba|deltanet|deltaattention|rglru|recurrent|shortconv|rwkv|lightning|retention", re.I
)


@dataclass(eq=False)
class Target:
    """A frozen HF causal language model and the parts a drafter borrows."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # hub id, or the directory's last component; never an absolute path
    path: Path

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> Target:
        """Load a directory, a hub id or a GGUF file (converted once) and freeze it.

        Raises ValueError, in one line, where nothing loadable lies there or a part cannot be found.
        """
        directory, name = resolve(path, need_weights=True)
        config = load_config(directory, trust_remote_code=trust_remote_code)
        model = _load_model(directory, config, dtype, trust_remote_code)
        tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
        target = cls.of(model.to(device), tokenizer, name=name)  # pyright: ignore[reportArgumentType]
        target.path = directory
        return target

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name: str
    ) -> Target:
        """Freeze a model already in memory; raises ValueError where a part cannot be found."""
        model.eval().requires_grad_(False)
        target = cls(model=model, tokenizer=tokenizer, name=name, path=Path(name))
        _ = (target.backbone, target.layers, target.final_norm, target.head_module)
        return target

    @cached_property
    def config(self) -> PretrainedConfig:
        """The text model's config, nested or not."""
        return self.model.config.get_text_config(decoder=True)

    @cached_property
    def backbone(self) -> nn.Module:
        """The module that owns embedding, layers and final norm; call it to skip the head."""
        embedding = self._embedding_module
        for module in self.model.modules():
            owns_embedding = any(child is embedding for child in module.children())
            if owns_embedding and _layer_list(module) is not None:
                return module
        raise ValueError(
            f"{self.name}: no module of {type(self.model).__name__} owns the embedding and a list "
            f"of layers ({', '.join(LAYER_LISTS)}); expected a decoder-only model"
        )

    @cached_property
    def layers(self) -> nn.ModuleList:
        layers = _layer_list(self.backbone)
        assert layers is not None
        return layers

    @cached_property
    def final_norm(self) -> nn.Module:
        children = dict(self.backbone.named_children())
        for name in FINAL_NORMS:
            if name in children:
                return children[name]
        norms = [m for m in children.values() if "norm" in type(m).__name__.lower()]
        if len(norms) != 1:
            raise ValueError(
                f"{self.name}: {len(norms)} candidates for the final norm in "
                f"{type(self.backbone).__name__} (children: {', '.join(children)}); "
                f"expected one of {', '.join(FINAL_NORMS)}"
            )
        return norms[0]

    @cached_property
    def head_module(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        if head is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise ValueError(
                f"{self.name}: {type(self.model).__name__} has no output head with a weight; load "
                "the causal language model, not its base model"
            )
        rows = tuple(head.weight.shape)
        if rows != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"{self.name}: head has shape {rows}, expected {self.vocab_size, self.hidden_size} "
                "(embedding rows, hidden size); a factored or resized head is not supported"
            )
        return head

    @property
    def _embedding_module(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def embedding(self) -> Tensor:
        """[V, H] raw rows, before any scaling the model applies to them."""
        weight = self._embedding_module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head(self) -> Tensor:
        """[V, H] weight of the output head; the embedding itself when tied."""
        weight = self.head_module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        bias = getattr(self.head_module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def logit_softcap(self) -> float | None:
        """The cap that the model applies; None where its code never reads the config's value."""
        return logit_softcap(self.config) if self._reads_softcap else None

    @cached_property
    def _reads_softcap(self) -> bool:
        # The multimodal wrapper of Gemma 3 carries the text model's cap and ignores it.
        kinds = {type(m) for m in self.model.modules() if isinstance(m, PreTrainedModel)}
        try:
            return any("final_logit_softcapping" in inspect.getsource(kind) for kind in kinds)
        except (OSError, TypeError):  # no source: believe the config, `check_teacher` will tell
            return True

    @property
    def logit_scale(self) -> float:
        return logit_scale(self.config)

    @cached_property
    def has_recurrent_state(self) -> bool:
        """True where a layer keeps a running state, which cannot be rolled back by a length."""
        if recurrent_layers(self.config):
            return True
        return any(RECURRENT_MODULE.search(type(m).__name__) for m in self.layers.modules())

    def require_rollback(self) -> None:
        """Raise ValueError where the target cannot forget rejected tokens."""
        if self.has_recurrent_state:
            raise ValueError(
                f"{self.name}: has layers with a recurrent state, which in-process decoding cannot "
                "roll back; train on its logs and measure it on a serving engine instead"
            )

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name}: no tokenizer files beside the weights; copy tokenizer.json and "
                "tokenizer_config.json of the model into that directory"
            )
        return self.tokenizer

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every end token of the generation config, the config and the tokenizer."""
        generation = getattr(self.model, "generation_config", None)
        sources = (
            getattr(generation, "eos_token_id", None),
            getattr(self.config, "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        )
        return _unique_ids(sources)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own logits from final-norm outputs: [..., H] -> [..., V]."""
        return head_logits(
            last_hidden,
            self.head,
            bias=self.head_bias,
            scale=self.logit_scale,
            softcap=self.logit_softcap,
        )

    @torch.no_grad()
    def check_teacher(self, input_ids: Tensor | Sequence[int]) -> float:
        """Largest absolute difference of `logits(final norm output)` to the model's own logits.

        `input_ids` is [L] or [B, L]. Raises ValueError on a mismatch: soft labels would teach
        something that the target does not say.
        """
        ids = torch.as_tensor(input_ids, dtype=torch.long, device=self.device)
        ids = ids if ids.dim() == 2 else ids[None]
        seen: list[Tensor] = []

        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            seen.append(output)

        handle = self.final_norm.register_forward_hook(keep)
        try:
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"{self.name}: the final norm ran {len(seen)} times in one forward pass, "
                f"expected 1; {NO_TEACHER}"
            )
        difference = (self.logits(seen[0]).float() - expected).abs().max().item()
        tolerance = 1e-4 if self.dtype == torch.float32 else 2e-2
        allowed = tolerance * max(1.0, expected.abs().max().item())
        if not difference <= allowed:  # NaN fails as well
            raise ValueError(
                f"{self.name}: logits from the captured hidden state differ from the target's by "
                f"{difference:.3g}, expected at most {allowed:.3g}; its head does something this "
                f"toolkit does not know: {NO_TEACHER}"
            )
        return difference


def load_config(directory: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read `config.json`; raises ValueError where transformers does not know the model."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(refusal(directory.name, "config.json was refused", error)) from error


def load_tokenizer(
    directory: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights, or None where the directory has no tokenizer files."""
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "vocab.txt")
    if not any((directory / name).exists() for name in (*known, "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ValueError(refusal(directory.name, "the tokenizer was refused", error)) from error


def recurrent_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Layers that `layer_types` (or an older name for it) declares recurrent, by index."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return tuple(i for i, kind in enumerate(kinds) if _is_recurrent(str(kind).lower()))


def _is_recurrent(kind: str) -> bool:
    return any(word in kind for word in RECURRENT_KINDS)


def _layer_list(module: nn.Module) -> nn.ModuleList | None:
    for name in LAYER_LISTS:
        layers = getattr(module, name, None)
        if isinstance(layers, nn.ModuleList) and len(layers) > 0:
            return layers
    return None


def meta_target(config: PretrainedConfig, *, name: str, trust_remote_code: bool = False) -> Target:
    """The target's structure on the meta device: every module, no weights, no memory."""
    try:
        with torch.device("meta"):
            model = _loader(config).from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(refusal(name, "the model cannot be built", error)) from error
    return Target.of(model, None, name=name)


def _loader(config: PretrainedConfig) -> Any:
    wrapped = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    multimodal = wrapped and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def _load_model(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    loader = _loader(config)
    try:
        with quiet_progress():
            model, info = loader.from_pretrained(
                directory,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except REFUSALS as error:
        raise ValueError(refusal(directory.name, "the weights were refused", error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        # The library would fill them at random and go on.
        raise ValueError(
            f"{directory.name}: {len(missing)} weights are missing, first {missing[0]}; the files "
            "are incomplete or belong to another architecture: copy the model again"
        )
    return model


def _unique_ids(sources: Sequence[int | Sequence[int] | None]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in sources:
        if source is None:
            continue
        for token_id in [source] if isinstance(source, int) else source:
            ids[int(token_id)] = None
    return tuple(ids)
