"""Both sides of the parity gate: our own loop on the prompts, and the engine's runs on the same.

Stop tokens are ignored on both sides, so that every answer has the same length and no round is cut
short. The target leaves memory before the engine starts.

Shapes: T tokens of a prompt, L target layers, n captured ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data.prompts import Prompt
from ..eval.decode import Decoded, speculate
from ..eval.drafter import NetworkDrafter
from ..eval.report import encode_groups
from ..recipes.algorithms import algorithm_of, load_draft
from ..target.engine import Answer, Engine, EngineError, free_port
from ..target.launch import Launch, cpu_launch
from ..target.model import Target
from .counts import sglang_options
from .parity import PassResult, compare_pass
from .plan import Plan
from .probe import Probe, probe

PASSES = ("single", "batched", "cached")
FEATURE_PROMPTS = 4  # whose context features are compared
PROBE_PROMPTS = 8
PROBE_TOKENS = 48
Tell = Callable[[str], None]


@dataclass
class Ours:
    """What `spec` itself finds on the prompts."""

    prompts: list[list[int]]
    num_skipped: dict[str, int]  # prompts that cannot be decoded, by reason
    decoded: list[Decoded]
    features: list[Tensor]  # [L, T, H] of the first prompts: the embedding, then all layers but one
    layer_ids: tuple[int, ...]
    num_draft_tokens: int
    algorithm: str
    quantized: bool
    target_name: str
    target_path: Path
    probed: Probe | None


@dataclass(frozen=True)
class Plain:
    """The engine without a drafter: what it captured and answered, and its version."""

    features: list[Tensor]  # [T, n*H] of the first prompts
    answers: list[list[int]]
    version: str | None


def measure(plan: Plan, prompts: Sequence[Prompt], tell: Tell) -> Ours:
    """Our own rounds on the prompts, the target's features, and the probe."""
    tell(f"ours: {len(prompts)} prompts, {plan.max_new_tokens} tokens each")
    target = Target.load(plan.target, dtype=getattr(torch, plan.dtype), device=plan.device)
    draft = load_draft(plan.directory, dtype=target.dtype, device=plan.device)
    config = draft.config
    groups, skipped = encode_groups(target, prompts, plan.max_new_tokens + config.num_draft_tokens)
    ids = [prompt for group in groups.values() for prompt in group]
    drafter = NetworkDrafter(draft, target)
    options = {"max_new_tokens": plan.max_new_tokens, "stop_token_ids": ()}
    decoded = speculate(target, drafter, ids, batch_size=min(8, len(ids)), **options)
    probed = None
    if plan.probe:
        tell("probe: the same drafter with one likely mistake undone at a time")
        tokens = min(PROBE_TOKENS, plan.max_new_tokens)
        probed = probe(draft, target, ids[:PROBE_PROMPTS], max_new_tokens=tokens)
    return Ours(
        prompts=ids,
        num_skipped=dict(skipped),
        decoded=decoded,
        features=[_every_layer(target, prompt) for prompt in ids[:FEATURE_PROMPTS]],
        layer_ids=tuple(config.target_layer_ids),
        num_draft_tokens=config.num_draft_tokens,
        algorithm=algorithm_of(plan.directory),
        quantized=config.quantization is not None,
        target_name=target.name,
        target_path=target.path,
        probed=probed,
    )


@torch.no_grad()
def _every_layer(target: Target, ids: Sequence[int]) -> Tensor:
    """[L, T, H]: the embedding's output and that of each layer but the last, on the CPU."""
    tokens = torch.tensor([list(ids)], device=target.device)
    states = target.backbone(input_ids=tokens, use_cache=False, output_hidden_states=True)
    # The last one has been through the final norm; no engine captures that layer.
    return torch.stack([state[0].float().cpu() for state in states.hidden_states[:-1]])


def run_plain(plan: Plan, ours: Ours, tell: Tell) -> Plain:
    """Serve the target alone: features of the first prompts, and plain answers to all."""
    tell("engine, without the drafter: starting")
    capture = (
        *("--speculative-algorithm", "DFLASH", "--enable-return-aux-hidden-states"),
        *("--return-aux-hidden-state-layer-ids", *map(str, ours.layer_ids)),
        "--disable-radix-cache",  # a cached prefix would give fewer rows than tokens
    )
    with _engine(plan, ours, capture, "plain") as engine:
        tell("engine, without the drafter: context features and plain answers")
        first = ours.prompts[: len(ours.features)]
        features = [_features(answer) for answer in _ask(plan, engine, first, capture=True)]
        answers = [answer.output_ids for answer in _one_by_one(plan, engine, ours.prompts)]
        return Plain(features, answers, _version(engine))


def _features(answer: Answer) -> Tensor:
    """[T, n*H]: the rows of the prompt, which come first, together."""
    states = answer.meta.get("hidden_states")
    try:
        return torch.tensor(states[0], dtype=torch.float32)  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, ValueError, IndexError, KeyError):
        raise EngineError(f"expected hidden_states, the engine answered {states!r:.100}") from None


def run_passes(plan: Plan, ours: Ours, plain: Plain, tell: Tell) -> Iterator[PassResult]:
    """Serve target and drafter: each pass over the prompts, compared as it ends."""
    tell("engine, with the drafter: starting")
    options = sglang_options(ours.algorithm, ours.num_draft_tokens, quantized=ours.quantized)
    options += ["--speculative-draft-model-path", str(plan.directory)]
    with _engine(plan, ours, options, "draft") as engine:
        for name in PASSES:
            tell(f"engine, with the drafter: {name}")
            if name == "batched":
                engine.forget_prefixes()
                answers = _ask(plan, engine, ours.prompts)
            else:
                # One by one: those of one call would run as a batch.
                answers = _one_by_one(plan, engine, ours.prompts, forget=name == "single")
            yield compare_pass(name, answers, plain.answers, ours.decoded, ours.num_draft_tokens)


def _engine(plan: Plan, ours: Ours, options: Sequence[str], name: str) -> Engine:
    arguments = ["--model-path", str(ours.target_path), "--dtype", plan.dtype, *options]
    environment: dict[str, str] = {}
    if plan.tensor_parallel > 1:
        arguments += ["--tp-size", str(plan.tensor_parallel)]
    if plan.device == "cpu":
        without_gpu, environment = cpu_launch(plan.tensor_parallel)
        arguments += without_gpu
    launch = Launch(
        plan.python, (*arguments, *plan.engine_arguments), environment, port=free_port()
    )
    return Engine(launch, log=plan.logs / f"engine-{name}.log", timeout=plan.timeout)


def _ask(
    plan: Plan, engine: Engine, prompts: Sequence[Sequence[int]], *, capture: bool = False
) -> list[Answer]:
    asked = 1 if capture else plan.max_new_tokens
    answers = engine.generate(
        prompts,
        max_new_tokens=asked,
        timeout=plan.timeout,
        sampling={"ignore_eos": True},
        **({"return_hidden_states": True} if capture else {}),
    )
    for answer in answers:
        if len(answer.output_ids) != asked:
            raise EngineError(
                f"an answer has {len(answer.output_ids)} tokens, asked were {asked}: the engine "
                "cut it short"
            )
    return answers


def _one_by_one(
    plan: Plan, engine: Engine, prompts: Sequence[Sequence[int]], *, forget: bool = False
) -> list[Answer]:
    answers: list[Answer] = []
    for prompt in prompts:
        if forget:
            engine.forget_prefixes()
        answers += _ask(plan, engine, [prompt])
    return answers


def _version(engine: Engine) -> str | None:
    info = engine.get("/server_info")
    return info.get("version") if isinstance(info, dict) else None
