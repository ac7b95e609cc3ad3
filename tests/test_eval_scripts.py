"""What the scripts of eval/ keep, measure again and put into their tables."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from tscompress.evaluation import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.recovery_config import RecoveryConfig

EVAL = Path(__file__).parents[1] / "eval"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """``comparison`` and ``recover``, imported as one of them that runs is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        names = ("comparison", "recover")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in (*names, "methods", "fold"):
            sys.modules.pop(name, None)


class Bench:
    """Stands for a bed of a comparison, and notes what it is asked to measure."""

    def __init__(self, settings: str) -> None:
        self.settings = settings
        self.asked: list[tuple[str, str, int]] = []

    def row(self, contender: Any) -> dict[str, Any]:
        self.asked.append((contender.kind, contender.label, contender.seed))
        recovered = contender.kind == "fold + recovery"
        return {
            "kind": contender.kind,
            "label": contender.label,
            "seed": contender.seed,
            "WQL": 1.0 + contender.seed / 10,
            "SQL": 1.0,
            "MASE": 1.0,
            "settings": self.settings if recovered else "",
        }


def test_a_comparison_measures_what_was_recovered_otherwise_again(
    scripts: Any, tmp_path: Path
) -> None:
    found = list(scripts.comparison.contenders((0, 1), []))
    path, console = tmp_path / "c.csv", Console(quiet=True)

    def asked(settings: str) -> list[tuple[str, str, int]]:
        bed = Bench(settings)
        frame = scripts.comparison.measure(bed, found, path, console)
        assert len(frame) == len(found)
        assert {row.settings for row in frame.itertuples() if row.kind == "fold + recovery"} == {
            settings
        }
        return bed.asked

    everything = [(c.kind, c.label, c.seed) for c in found]
    assert asked("00000001") == everything
    assert asked("00000001") == []  # an all-digit digest is not read as a number
    assert asked("abcdef01") == [row for row in everything if row[0] == "fold + recovery"]
    partial = pd.read_csv(path, dtype={"settings": str}).iloc[3:]
    partial.drop(columns="SQL").to_csv(path, index=False)
    assert asked("abcdef01") == everything[:3]


def test_settings_of_a_comparison_are_those_of_its_recovery(scripts: Any) -> None:
    digest = scripts.comparison.digest
    config = RecoveryConfig(steps=600)
    assert digest(config) == digest(RecoveryConfig(steps=600))
    for change in ({"steps": 601}, {"learning_rate": 1e-3}, {"optimizer": "adamw"}):
        assert digest(config) != digest(config.model_copy(update=change))


def test_the_table_of_a_comparison_says_nothing_where_a_metric_was_not_taken(scripts: Any) -> None:
    base = {"parameters": 0.5, "latency": 0.5, "latency low": 0.4, "latency high": 0.6}
    rows = [
        {"kind": "fold", "label": "a", "seed": seed, "WQL": wql, "SQL": sql, "MASE": 1.0, **base}
        for seed, wql, sql in ((0, 1.0, 1.01), (1, 1.1, 1.03))
    ]
    rows.append({"kind": "svd", "label": "b", "seed": -1, "WQL": 1.2, "MASE": 1.0, **base})
    frame = pd.DataFrame(rows).assign(**{"CPU minutes": 0.0})
    lines = scripts.comparison.markdown(frame).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0][4:7] == ["1.0500 ± 0.0500", "1.0200 ± 0.0100", "1.0000 ± 0.0000"]
    assert cells[1][4:7] == ["1.2000", "", "1.0000"]


def scores(values: np.ndarray) -> EvaluationResult:
    columns = SeriesContributions(
        quantile_loss=tuple(values.tolist()),
        absolute_label=(1.0,) * len(values),
        scaled_error=tuple(values.tolist()),
        scaled_steps=(1,) * len(values),
    )
    row = DatasetScore(
        dataset="d",
        model="m",
        WQL=columns.score("WQL"),
        MASE=columns.score("MASE"),
        series_count=len(values),
        seconds=1.0,
        series=columns,
    )
    return EvaluationResult(suite="s", model="m", rows=(row,))


def test_intervals_of_a_recovery_are_of_the_mean_of_its_seeds(scripts: Any) -> None:
    recover = scripts.recover
    rng = np.random.default_rng(0)
    before = 1 + rng.random(60)
    factors = {0: 0.9, 1: 1.0, 2: 1.25}

    class Bed(recover.Bed):  # type: ignore[misc]
        def __init__(self) -> None:
            self.scores = scores(before)

        def row(self, trial: Any, seed: int, *_: Any) -> Any:
            cells = dict.fromkeys(("WQL before", "SQL before", "SQL", "MASE before"), 1.0)
            loss = {"loss before": 0.1, "loss": 0.0, "series/s": 1.0, "fine-tuning series/s": 1.0}
            name = {"model": "m", "trial": trial.label, "data": "real", "optimizer": "muon"}
            rates = {"learning rate": 1e-3, "minutes": 1.0, "parameters": 0.5, "seed": seed}
            factor = factors[seed]
            row = {**name, **rates, **cells, **loss, "WQL": factor, "MASE": factor}
            return row, scores(before * factor)

    bed = Bed()
    trials = [recover.Trial(8, 1.0, 1), recover.Trial(4, 1.0, 1)]
    seen = []
    for so_far in recover.rows(bed, trials, (0, 1, 2), {}, False):
        seen.append(["WQL low" in row for row in so_far])
        text = recover.markdown(pd.DataFrame(so_far))
    assert seen[1] == [False, False]
    assert seen[2] == [True] * 3
    assert seen[4] == [True] * 3 + [False] * 2
    assert seen[5] == [True] * 6
    # Every series has the same ratio, so that there is nothing for the series to say.
    assert math.isclose(so_far[0]["WQL low"], 1.05, rel_tol=1e-9)
    assert math.isclose(so_far[0]["MASE high"], 1.05, rel_tol=1e-9)
    assert text.count("1.0500 (0.9000–1.2500); series 1.0500–1.0500") == 4
