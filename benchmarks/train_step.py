"""Time of one training step: forward, loss and backward of one sequence, at the shape of
SmolLM2-135M.

    python benchmarks/train_step.py --algo dflash --seq 1024 --anchors 64 --block 8 --dtype bf16
    --json out.json

Prints and writes: `seconds` (CPU time, median of five after a warm-up), `peak_memory_mb` above the
loaded model, `flops` (useful ones: no recomputation, attention only over what each block may see),
`matrix_rate_gflops` of this machine in the same run and dtype, and `matrix_rate_share` = flops /
seconds / rate.
"""

import argparse
import ctypes
import json
import resource
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec.dflash.config import DFlashConfig
from spec.dflash.loss import Head
from spec.dflash.objective import PackedSequence
from spec.dspark.config import HEAD_TYPES, DSparkConfig
from spec.recipes.algorithms import ALGORITHMS
from spec.recipes.schema import DSPARK_DEFAULTS, LossSection
from spec.train.memory import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_FEATURES = 4


def make_config(args: argparse.Namespace) -> DFlashConfig:
    heads: dict[str, Any] = {}
    if args.algo == "dspark":
        heads = {
            "markov_rank": args.rank,
            "markov_head_type": args.head,
            "enable_confidence_head": True,
            "confidence_head_with_markov": args.rank > 0,
        }
    return ALGORITHMS[args.algo].config(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        block_size=args.block,
        target_layer_ids=(1, 10, 18, 27),
        num_target_layers=30,
        mask_token_id=49151,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        **heads,
    )


def useful_flops(config: DFlashConfig, seq: int, anchors: Tensor, slots: int) -> float:
    """Multiply-adds x 2.

    Weight and input gradients, except for the frozen inputs (features, head). DSpark: the teacher's
    head once a position, and W2 with both gradients.
    """
    c = config
    tokens = len(anchors) * c.block_size
    kv = 2 * c.num_key_value_heads * c.head_dim * c.hidden_size
    layer = (
        2 * c.num_attention_heads * c.head_dim * c.hidden_size
        + kv
        + 3 * c.hidden_size * c.intermediate_size
    )
    backbone = 6.0 * tokens * layer * c.num_hidden_layers
    context = seq * (4.0 * c.num_features * c.hidden_size + 6.0 * kv * c.num_hidden_layers)
    visible = float(anchors.sum()) + len(anchors) * c.block_size
    attention = (
        12.0 * c.block_size * visible * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    )
    head = 4.0 * slots * c.hidden_size * c.vocab_size
    if isinstance(config, DSparkConfig):
        positions = (anchors[:, None] + torch.arange(config.block_size)).unique().numel()
        head += 2.0 * positions * c.hidden_size * c.vocab_size
        head += 6.0 * slots * config.markov_rank * c.vocab_size
    return backbone + context + attention + head


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOP/s of one large product, best of several.

    What a core gives when nothing stands in its way.
    """
    a, b = torch.randn(1024, 576, dtype=dtype), torch.randn(8192, 576, dtype=dtype)
    best = float("inf")
    for _ in range(12):
        start = time.process_time()
        for _ in range(4):
            torch.nn.functional.linear(a, b)
        best = min(best, (time.process_time() - start) / 4)
    return 2 * 1024 * 576 * 8192 / best


class PeakMemory:
    """Largest resident set while the block runs, in bytes above its start, sampled every 2 ms."""

    def __enter__(self) -> "PeakMemory":
        ctypes.CDLL(None).malloc_trim(0)  # pages freed while loading would hide what the step takes
        self.start = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def above_start(self) -> int:
        return self.peak - self.start


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algo", choices=sorted(ALGORITHMS), default="dflash")
    parser.add_argument("--head", choices=HEAD_TYPES, default="vanilla", help="of dspark")
    parser.add_argument("--rank", type=int, default=256, help="of dspark's head")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of context")
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--labels", choices=["hard", "soft"], default="hard", help="of dflash")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--profile", action="store_true", help="print the operators that take the time"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    dtype = DTYPES[args.dtype]
    config, algorithm = make_config(args), ALGORITHMS[args.algo]
    draft = algorithm.draft(config).to(dtype)
    embedding = (torch.randn(config.vocab_size, config.hidden_size) * 0.05).to(dtype)
    head = Head(embedding)
    S, soft = args.seq, args.labels == "soft" or args.algo == "dspark"
    sequence = PackedSequence(
        input_ids=torch.randint(0, 49000, (S,)),
        loss_mask=torch.ones(S, dtype=torch.long),
        starts=torch.zeros(S, dtype=torch.long),
        ends=torch.full((S,), S),
        features=torch.randn(S, config.num_features).to(dtype),
        teacher=torch.randn(S, config.hidden_size).to(dtype) if soft else None,
    )
    anchors = torch.randperm(S - args.block)[: args.anchors].sort().values
    terms = DSPARK_DEFAULTS["loss"] if args.algo == "dspark" else {}
    loss = LossSection(gamma=4.0, labels=args.labels, **terms)  # pyright: ignore[reportCallIssue]
    options = algorithm.options(loss, 1.0)

    def step() -> int:
        out = algorithm.sequence_loss(
            draft, sequence, anchors=anchors, embedding=embedding, head=head, options=options
        )
        out.loss.backward()
        draft.zero_grad(set_to_none=False)
        return int(out.num_slots)

    for parameter in draft.parameters():  # gradients belong to the loaded model, as do weights
        parameter.grad = torch.zeros_like(parameter)
    rate = matrix_rate(dtype)
    with PeakMemory() as memory:
        slots = step()
        times = []
        for _ in range(args.repeats):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    seconds = statistics.median(times)
    rate = max(rate, matrix_rate(dtype))
    flops = useful_flops(config, S, anchors, slots)
    result = {
        "algo": args.algo,
        "seq": S,
        "anchors": len(anchors),
        "block": args.block,
        "dtype": args.dtype,
        "labels": args.labels,
        "seconds": round(seconds, 4),
        "peak_memory_mb": round(memory.above_start / 2**20, 1),
        "flops": flops,
        "matrix_rate_gflops": round(rate / 1e9, 1),
        "matrix_rate_share": round(flops / seconds / rate, 3),
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.profile:
        with torch.profiler.profile() as profile:
            step()
        print(
            profile.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60
            )
        )


if __name__ == "__main__":
    main()
