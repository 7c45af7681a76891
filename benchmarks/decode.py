"""What a round of speculative decoding costs beyond the two models, and tokens per second.

    python benchmarks/decode.py --target DIR --draft DIR --dtype bf16 --json out.json

Without --target: random weights in the shape of SmolLM2-135M. Without --draft: a random drafter in
the quickstart's shape, which is right about nothing, so every round yields one token: its figure is
the cost of a round, not a speed-up. Times are CPU seconds of one thread (medians over rounds), so
that a busy machine changes them little.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.eval.decode import Batch, commit, propose, speculate, verify
from spec.eval.drafter import Drafter, NetworkDrafter
from spec.target.capture import Capture, default_layer_ids
from spec.target.model import Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_target(dtype: torch.dtype) -> Target:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target.of(model, None, name="random SmolLM2-135M shape")


def random_draft(target: Target) -> DFlashDraft:
    width = target.hidden_size
    heads = max(1, width // 64)
    config = DFlashConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        vocab_size=target.vocab_size,
        block_size=8,
        target_layer_ids=default_layer_ids(target.num_layers, min(4, target.num_layers - 3)),
        num_target_layers=target.num_layers,
        mask_token_id=target.vocab_size - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    return DFlashDraft(config).to(target.dtype).eval()


@dataclass
class Clock:
    """CPU seconds inside the wrapped calls; a call inside another counts as the outer one's."""

    seconds: dict[str, float] = field(default_factory=dict)
    depth: int = 0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            started = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    spent = time.process_time() - started
                    self.seconds[name] = self.seconds.get(name, 0.0) + spent

        setattr(owner, method, timed)


def time_rounds(
    target: Target, drafter: NetworkDrafter, prompts: list[list[int]], num_rounds: int
) -> dict[str, float]:
    """Median milliseconds of a round and of its parts, and what is left between them."""
    clock = Clock()
    clock.wrap(drafter, "propose", "drafter")
    clock.wrap(drafter, "observe", "drafter")
    clock.wrap(target.backbone, "forward", "target")
    clock.wrap(target, "logits", "target")
    rounds: list[tuple[float, float, float]] = []
    with Capture(target, drafter.target_layer_ids, last=False) as capture:
        batch = Batch(
            target,
            drafter,
            num_slots=len(prompts),
            max_length=max(map(len, prompts)) + num_rounds * (drafter.num_draft_tokens + 1),
            max_new_tokens=num_rounds * (drafter.num_draft_tokens + 1),
            stop_token_ids=(),
            capture=capture,
        )
        batch.start(list(enumerate(prompts)))
        for _ in range(num_rounds):
            slots = batch.slots()
            clock.seconds.clear()
            started = time.process_time()
            proposal = propose(batch, slots)
            verdict = verify(batch, slots, proposal)
            commit(batch, verdict)
            whole = time.process_time() - started
            rounds.append((whole, clock.seconds["target"], clock.seconds["drafter"]))
    for owner, method in (
        (drafter, "propose"),
        (drafter, "observe"),
        (target.backbone, "forward"),
        (target, "logits"),
    ):
        delattr(owner, method)
    rounds = rounds[2:]  # the first choose kernels
    parts = {
        "round_ms": [whole for whole, _, _ in rounds],
        "target_ms": [t for _, t, _ in rounds],
        "drafter_ms": [d for _, _, d in rounds],
        "beyond_models_ms": [whole - t - d for whole, t, d in rounds],
    }
    return {name: 1000 * statistics.median(values) for name, values in parts.items()}


def time_decoding(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], new_tokens: int
) -> dict[str, float]:
    started, wall = time.process_time(), time.perf_counter()
    decoded = speculate(
        target,
        drafter,
        prompts,
        max_new_tokens=new_tokens,
        batch_size=len(prompts),
        stop_token_ids=(),
    )
    tokens = sum(len(d.output_ids) for d in decoded)
    accepted = sum(sum(d.num_accepted) for d in decoded)
    rounds = sum(len(d.num_accepted) for d in decoded)
    return {
        "tokens_per_cpu_second": tokens / (time.process_time() - started),
        "tokens_per_second": tokens / (time.perf_counter() - wall),
        "acceptance_length": 1 + accepted / max(rounds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", help="directory, hub id or GGUF file")
    parser.add_argument("--draft", type=Path, help="drafter directory")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = DTYPES[args.dtype]
    target = Target.load(args.target, dtype=dtype) if args.target else random_target(dtype)
    draft = DFlashDraft.load(args.draft, dtype=dtype) if args.draft else random_draft(target)
    drafter = NetworkDrafter(draft.eval(), target)
    draft_name = args.draft.name if args.draft else "random"
    batches: dict[str, dict[str, float]] = {}
    for size in args.batch:
        generator = torch.Generator().manual_seed(size)
        shape = (size, args.prompt_tokens)
        prompts = torch.randint(target.vocab_size, shape, generator=generator).tolist()
        rounds = time_rounds(target, drafter, prompts, args.rounds + 2)
        plain = time_decoding(target, None, prompts, args.new_tokens)
        drafted = time_decoding(target, drafter, prompts, args.new_tokens)
        batches[str(size)] = {
            **rounds,
            **{f"plain_{k}": v for k, v in plain.items() if k != "acceptance_length"},
            **{f"speculative_{k}": v for k, v in drafted.items() if k != "acceptance_length"},
            "acceptance_length": drafted["acceptance_length"],
        }
        print(f"batch {size}: " + ", ".join(f"{k} {v:.2f}" for k, v in batches[str(size)].items()))
    result = {
        "target": target.name,
        "draft": draft_name,
        "dtype": args.dtype,
        "num_draft_tokens": drafter.num_draft_tokens,
        "num_threads": 1,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "batches": batches,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
