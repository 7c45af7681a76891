"""What a decision of the prefix scheduler and a fit of the temperatures cost.

    python benchmarks/schedule.py

Medians in milliseconds on one thread; survivals and the cost table are synthetic. The decision is
made once a step on the host, so it has to be small beside a step of the target.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from spec.dspark.calibration import fit_sts
from spec.dspark.schedule import CostTable, prefix_schedule

NUM_SLOTS = 16


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def main() -> None:
    rng = np.random.default_rng(0)
    table = CostTable((1, 64, 512, 4096), (100.0, 95.0, 50.0, 8.0))
    for num_requests in (1, 16, 256):
        draws = rng.beta(4, 1, size=(num_requests, NUM_SLOTS))
        survivals = np.cumprod(draws, axis=1, dtype=np.float64)
        admitted = int(prefix_schedule(survivals, table).sum())
        took = milliseconds(lambda s=survivals: prefix_schedule(s, table), repeats=200)
        print(f"schedule {num_requests:>3} x {NUM_SLOTS}: {took:.3f} ms ({admitted} admitted)")
    logits = rng.normal(2, 1, size=(20_000, NUM_SLOTS))
    survives = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(survives, axis=1).sum(axis=1)
    took = milliseconds(lambda: fit_sts(logits, accepted), repeats=3)
    print(f"fit_sts 20000 x {NUM_SLOTS}: {took:.0f} ms")


if __name__ == "__main__":
    main()
