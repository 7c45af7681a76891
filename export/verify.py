"""The parity gate: a drafter directory on the real engine, compared number by number.

In this order: `spec check`; our own loop on the prompts, and the probe for mistakes that the engine
would share; the engine without a drafter, for its context features and its plain answers; the
engine with the drafter, the same prompts one by one, all at once, and again out of its prefix
cache. Stop tokens are ignored on both sides, so that every answer has the same length and no round
is cut short. The target leaves memory before the engine starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.jsonl import atomic_file
from ..data.prompts import Prompt
from ..eval.decode import Decoded, speculate
from ..eval.drafter import NetworkDrafter
from ..eval.report import encode_groups
from ..recipes.algorithms import algorithm_of, load_draft
from ..target.engine import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    Answer,
    Engine,
    EngineError,
    Launch,
    free_port,
)
from ..target.model import Target
from .check import check
from .diagnosis import diagnose_drafter, diagnose_features, diagnose_passes
from .findings import Finding, defect
from .parity import LayerMatch, PassResult, acceptance, compare_features, compare_pass
from .probe import Probe, probe
from .serving import sglang_options

SCHEMA = 1
PASSES = ("single", "batched", "cached")
FEATURE_PROMPTS = 4  # whose context features are compared
PROBE_PROMPTS = 8
PROBE_TOKENS = 48
Dtype = Literal["float32", "bfloat16"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to verify, and how the engine is started."""

    directory: Path
    target: str
    python: str
    logs: Path  # directory of the engine's logs
    dtype: Dtype = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = 1
    max_new_tokens: int = 64
    tolerance: float = 0.01  # of the acceptance length, in other dtypes than float32
    timeout: float = 600.0  # seconds for the engine to start, and for a pass
    engine_arguments: tuple[str, ...] = ()
    check_first: bool = True
    probe: bool = True


@dataclass
class Ours:
    """What `spec` itself finds on the prompts."""

    prompts: list[list[int]]
    decoded: list[Decoded]
    features: list[Tensor]  # [L+1, T, H] of the first prompts: the embedding, then each layer
    layer_ids: tuple[int, ...]
    num_draft_tokens: int
    algorithm: str
    quantized: bool
    target_name: str
    target_path: Path
    probed: Probe | None


@dataclass
class Verification:
    """The report of the gate."""

    facts: dict[str, Any]
    findings: list[Finding]
    layers: list[LayerMatch] = field(default_factory=list)
    passes: list[PassResult] = field(default_factory=list)
    probed: Probe | None = None

    @property
    def passed(self) -> bool:
        """Every pass ran, and nothing is a defect."""
        ran = [each.name for each in self.passes] == list(PASSES)
        return ran and not any(each.severity == "defect" for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.facts,
            "passed": self.passed,
            "findings": [asdict(each) for each in self.findings],
            "hidden_states": [asdict(each) for each in self.layers],
            "passes": {each.name: each.to_json() for each in self.passes},
            "probe": None if self.probed is None else self.probed.to_json(),
        }


def verify(plan: Plan, prompts: Sequence[Prompt], *, tell: Tell) -> Verification:
    """Prove a drafter on the engine. A drafter that fails is a report, not an exception.

    Raises ValueError where the target, the prompts or the engine's interpreter are missing.
    """
    result = Verification(_facts(plan), [])
    if plan.check_first:
        tell("check: the files, against the target")
        report = check(plan.directory, target=plan.target)
        result.findings += report.findings
        if report.has_defect:
            return result
    ours = _measure(plan, prompts, tell)
    result.probed = ours.probed
    length = acceptance(ours.decoded, ours.num_draft_tokens)
    result.facts |= {
        "target": ours.target_name,
        "algorithm": ours.algorithm,
        "num_draft_tokens": ours.num_draft_tokens,
        "num_prompts": len(ours.prompts),
        "acceptance_length_ours": length,
    }
    result.findings += diagnose_drafter(ours.probed, length, _recorded(plan.directory))
    try:
        plain = _run_plain(plan, ours, result, tell)
        _run_with_drafter(plan, ours, plain, result, tell)
    except EngineError as error:
        cure = "read the log; spec serve --print shows what the engine's argument check says"
        result.findings.append(defect(str(error), cure, "SGLang"))
    result.findings += diagnose_passes(result.passes, plan.dtype, plan.tolerance)
    return result


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "draft": plan.directory.resolve().name,
        "target": Path(plan.target).name,
        "engine": "sglang",
        "dtype": plan.dtype,
        "device": plan.device,
        "tensor_parallel": plan.tensor_parallel,
        "max_new_tokens": plan.max_new_tokens,
        "engine_arguments": list(plan.engine_arguments),
        "stop_tokens": "ignored",
        "bonus_token_counted": True,
        "tolerance": 0.0 if plan.dtype == "float32" else plan.tolerance,
    }


def _measure(plan: Plan, prompts: Sequence[Prompt], tell: Tell) -> Ours:
    """Our own rounds on the prompts, the target's features, and the probe."""
    tell(f"ours: {len(prompts)} prompts, {plan.max_new_tokens} tokens each")
    target = Target.load(plan.target, dtype=getattr(torch, plan.dtype), device=plan.device)
    draft = load_draft(plan.directory, dtype=target.dtype, device=plan.device)
    config = draft.config
    groups, _ = encode_groups(target, prompts, plan.max_new_tokens + config.num_draft_tokens)
    ids = [prompt for group in groups.values() for prompt in group]
    drafter = NetworkDrafter(draft, target)
    options = {"max_new_tokens": plan.max_new_tokens, "stop_token_ids": ()}
    decoded = speculate(target, drafter, ids, batch_size=min(8, len(ids)), **options)
    probed = None
    if plan.probe:
        tell("probe: the same drafter with one likely mistake undone at a time")
        tokens = min(PROBE_TOKENS, plan.max_new_tokens)
        probed = probe(
            draft, target, ids[:PROBE_PROMPTS], max_new_tokens=tokens, advance=lambda what: None
        )
    return Ours(
        prompts=ids,
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


def _run_plain(plan: Plan, ours: Ours, result: Verification, tell: Tell) -> list[list[int]]:
    """The engine without a drafter: features of the first prompts, and plain answers to all."""
    tell("engine, without the drafter: starting")
    capture = (
        *("--speculative-algorithm", "DFLASH", "--enable-return-aux-hidden-states"),
        *("--return-aux-hidden-state-layer-ids", *map(str, ours.layer_ids)),
        "--disable-radix-cache",  # a cached prefix would give fewer rows than tokens
    )
    with _engine(plan, ours, capture, "plain") as engine:
        result.facts["engine_version"] = _version(engine)
        tell("engine, without the drafter: context features and plain answers")
        first = ours.prompts[: len(ours.features)]
        captured = [_features(answer) for answer in _ask(plan, engine, first, capture=True)]
        result.layers = compare_features(captured, ours.features, ours.layer_ids)
        result.findings += diagnose_features(result.layers, plan.dtype)
        return [answer.output_ids for answer in _one_by_one(plan, engine, ours.prompts)]


def _features(answer: Answer) -> Tensor:
    """[T, n*H]: the rows of the prompt, which come first, together."""
    return torch.tensor(answer.meta["hidden_states"][0])


def _run_with_drafter(
    plan: Plan, ours: Ours, plain: list[list[int]], result: Verification, tell: Tell
) -> None:
    tell("engine, with the drafter: starting")
    counts = sglang_options(ours.algorithm, ours.num_draft_tokens, quantized=ours.quantized)
    options = [word for option in counts for word in option.split()]
    options += ["--speculative-draft-model-path", str(plan.directory)]
    with _engine(plan, ours, options, "draft") as engine:
        for name in PASSES:
            tell(f"engine, with the drafter: {name}")
            if name != "cached":
                engine.forget_prefixes()
            if name == "batched":
                answers = _ask(plan, engine, ours.prompts)
            else:
                # One by one, or the first of a pair with a common start would fill the cache.
                answers = _one_by_one(plan, engine, ours.prompts, flush=name == "single")
            compared = compare_pass(name, answers, plain, ours.decoded, ours.num_draft_tokens)
            result.passes.append(compared)
            if name == "cached" and not compared.cached_tokens:
                result.findings.append(
                    defect(
                        "no token came from the prefix cache in the pass that asks again",
                        "serve without --disable-radix-cache and with room for the prompts",
                        "SGLang",
                    )
                )


def _engine(plan: Plan, ours: Ours, options: Sequence[str], name: str) -> Engine:
    arguments = ["--model-path", str(ours.target_path), "--dtype", plan.dtype, *options]
    environment: dict[str, str] = {}
    if plan.tensor_parallel > 1:
        arguments += ["--tp-size", str(plan.tensor_parallel)]
    if plan.device == "cpu":
        arguments += CPU_ARGUMENTS
        environment |= CPU_ENVIRONMENT
        if plan.tensor_parallel > 1:  # a core a rank
            cores = "|".join(map(str, range(plan.tensor_parallel)))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    launch = Launch(
        plan.python, (*arguments, *plan.engine_arguments), environment, port=free_port()
    )
    return Engine(launch, log=plan.logs / f"engine-{name}.log", timeout=plan.timeout)


def _ask(
    plan: Plan, engine: Engine, prompts: Sequence[Sequence[int]], *, capture: bool = False
) -> list[Answer]:
    return engine.generate(
        prompts,
        max_new_tokens=1 if capture else plan.max_new_tokens,
        timeout=plan.timeout,
        sampling={"ignore_eos": True},
        **({"return_hidden_states": True} if capture else {}),
    )


def _one_by_one(
    plan: Plan, engine: Engine, prompts: Sequence[Sequence[int]], *, flush: bool = False
) -> list[Answer]:
    answers: list[Answer] = []
    for prompt in prompts:
        if flush:
            engine.forget_prefixes()
        answers += _ask(plan, engine, [prompt])
    return answers


def _version(engine: Engine) -> str | None:
    info = engine.get("/server_info")
    return info.get("version") if isinstance(info, dict) else None


def _recorded(directory: Path) -> float | None:
    """The acceptance length that spec.json says was measured after training."""
    try:
        report = json.loads((directory / "spec.json").read_text())["acceptance_report"]
        return float(report["groups"]["all"]["acceptance_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_verification(result: Verification, out: Path) -> Path:
    """Write verify.json, whole or not at all."""
    path = out / "verify.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode())
    return path
