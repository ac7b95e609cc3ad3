"""How often 95 % intervals of a ratio of scores hold the true one, for four kinds of interval.

    tscompress evaluate reference/bolt --output bolt.json
    tscompress compress reference/bolt --rank 8 --ff-ratio 0.25 --output small
    tscompress evaluate small --output small.json
    python eval/coverage.py bolt.json small.json

Prints Markdown: the share of intervals that hold the truth, and in brackets their mean width in
logarithms. The truth is known because series are drawn, with replacement, from what the two results
hold for every series, or from log-normal losses. `tscompress.evaluation.intervals` uses
"percentile, n − 1".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tscompress.evaluation.results import METRICS, EvaluationResult

Values = npt.NDArray[np.float64]
Pair = tuple[Values, Values]
Draw = Callable[[np.random.Generator], Pair]

RESAMPLES = 400
LEVELS = np.array([0.025, 0.975])
NORMAL = NormalDist()
KINDS = ("percentile, n − 1", "percentile, n", "BCa, n", "normal")


def log_ratios(pair: Pair, draws: int, rng: np.random.Generator) -> Values:
    """``[RESAMPLES]`` logarithms of the ratio of sums, of ``draws`` series each."""
    before, after = pair
    chosen = rng.integers(len(before), size=(RESAMPLES, draws))
    return np.log(after[chosen].sum(axis=1) / before[chosen].sum(axis=1))


def intervals(datasets: Sequence[Pair], rng: np.random.Generator) -> dict[str, Values]:
    """Of the mean log ratio over the datasets: lower and upper end, for each kind."""
    count = len(datasets)
    point = np.mean([np.log(after.sum() / before.sum()) for before, after in datasets])
    influence = [(b / b.sum() - a / a.sum()) / count for a, b in datasets]
    variance = sum(np.square(one).sum() * len(one) / (len(one) - 1) for one in influence)
    squares = sum(np.square(one).sum() for one in influence)
    acceleration = sum((one**3).sum() for one in influence) / (6 * squares**1.5)
    whole = np.mean([log_ratios(pair, len(pair[0]), rng) for pair in datasets], axis=0)
    fewer = np.mean([log_ratios(pair, len(pair[0]) - 1, rng) for pair in datasets], axis=0)
    share = np.clip((whole < point).mean(), 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)
    bias = NORMAL.inv_cdf(float(share))
    moved = bias + np.array([NORMAL.inv_cdf(float(level)) for level in LEVELS])
    corrected = [NORMAL.cdf(bias + one / (1 - acceleration * one)) for one in moved]
    return {
        "percentile, n − 1": np.quantile(fewer, LEVELS),
        "percentile, n": np.quantile(whole, LEVELS),
        "BCa, n": np.quantile(whole, corrected),
        "normal": point + np.array([-1.96, 1.96]) * np.sqrt(variance),
    }


def coverage(draws: Sequence[Draw], truth: float, repeats: int, seed: int = 1) -> list[str]:
    """One cell a kind."""
    rng = np.random.default_rng(seed)
    held = dict.fromkeys(KINDS, 0)
    width = dict.fromkeys(KINDS, 0.0)
    for _ in range(repeats):
        for kind, (low, high) in intervals([draw(rng) for draw in draws], rng).items():
            held[kind] += bool(low <= truth <= high)
            width[kind] += high - low
    return [f"{held[kind] / repeats:.3f} ({width[kind] / repeats:.4f})" for kind in KINDS]


def from_results(first: EvaluationResult, second: EvaluationResult, metric: str) -> list[Pair]:
    """What every series that counts adds to the scores of both."""
    pairs = []
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.series is not None, "evaluate again: the results have no series"
        assert other.series is not None, "evaluate again: the results have no series"
        before, counted = one.series.parts(metric)
        pairs.append((before[counted > 0], other.series.parts(metric)[0][counted > 0]))
    return pairs


def sampler(population: Pair, size: int | None) -> Draw:
    """Draws ``size`` series, or as many as there are."""
    count = len(population[0])

    def draw(rng: np.random.Generator) -> Pair:
        chosen = rng.integers(count, size=size or count)
        return population[0][chosen], population[1][chosen]

    return draw


def log_normal(spread: float, size: int) -> Draw:
    """Losses of log-normal size; the second model's differ by e^(0.2 z): the truth is e^0.02."""

    def draw(rng: np.random.Generator) -> Pair:
        before = np.exp(spread * rng.normal(size=size))
        return before, before * np.exp(0.2 * rng.normal(size=size))

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs=2)
    parser.add_argument("--repeats", type=int, default=400)
    arguments = parser.parse_args()
    first, second = (EvaluationResult.load(path) for path in arguments.results)
    print("| series | a dataset | " + " | ".join(KINDS) + " |")
    print("|---|--:|" + "--:|" * len(KINDS))
    for metric in METRICS:
        populations = from_results(first, second, metric)
        truth = float(
            np.mean([np.log(after.sum() / before.sum()) for before, after in populations])
        )
        for size in (8, 40, None):
            draws = [sampler(population, size) for population in populations]
            cells = coverage(draws, truth, arguments.repeats)
            print(
                f"| {metric}, {len(draws)} datasets | {size or 'all'} | " + " | ".join(cells) + " |"
            )
    for spread in (0.3, 1.5):
        for sizes in ((5,), (15,), (60,), (400,), (5, 8, 20, 60)):
            draws = [log_normal(spread, size) for size in sizes]
            cells = coverage(draws, 0.02, arguments.repeats)
            name = f"log-normal, spread {spread:g}"
            print(f"| {name} | {', '.join(map(str, sizes))} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
