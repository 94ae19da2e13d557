"""The statistics of an evaluation: an interval over tasks, and what several attempts tell.

Pure functions of scores. Invariant: the same scores and seed give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

RESAMPLES = 10_000
_CHUNK = 1_000
"""Resamples drawn at once, so that memory stays small with thousands of tasks."""


def bootstrap_interval(
    values: Sequence[float], *, seed: int, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, resampling `values` with replacement.

    Args:
        values: one per task, at least one. Tasks are the unit: attempts at one task are not independent.
        level: how much of the resampled means the interval holds.
    """
    if not values:
        raise ValueError("Expected at least one value to resample, got none.")
    sample, rng = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    sizes = [min(_CHUNK, resamples - start) for start in range(0, resamples, _CHUNK)]
    means = np.concatenate([sample[rng.integers(len(sample), size=(size, len(sample)))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def expected_best(scores: Sequence[float], k: int) -> float:
    """Return the mean of the best score over all ways to choose `k` of the attempts at one task.

    The unbiased estimate of best-of-k; on zeros and ones that of pass@k. Of `1 - score` it gives the expected worst.

    Raises:
        ValueError: fewer than `k` scores.
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"Expected k between 1 and {len(scores)} attempts, got {k}.")
    ways = comb(len(scores), k)
    # The score of rank r (from 0, ascending) is the best in the choices that take the others from the r below it.
    return sum(score * comb(rank, k - 1) for rank, score in enumerate(sorted(scores))) / ways


def attempt_counts(attempts: int) -> tuple[int, ...]:
    """Return the k worth showing for so many attempts: powers of two above one, and the number itself."""
    powers = {2**exponent for exponent in range(1, attempts.bit_length())}
    return tuple(sorted({k for k in powers if k <= attempts} | ({attempts} if attempts > 1 else set())))
