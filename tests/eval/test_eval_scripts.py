"""What the scripts of eval/ keep, measure again and put into their tables."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from tscompress.checkpoints.load import load
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import UsageError
from tscompress.evaluation.results import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.families.registry import adapter_of
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows.recipe import EvaluationConfig

EVAL = Path(__file__).parents[2] / "eval"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Those of tables, imported as one of them that runs is."""
    names = ("comparison", "recover", "reproduce", "fold", "methods", "peers", "family", "shapes",
             "fold_growth", "table2")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in (*names, "peer_methods", "output"):
            sys.modules.pop(name, None)


class Bench:
    """Stands for a bed of a comparison, and notes what it is asked to measure."""

    def __init__(self, scored_on: str, recovery: str) -> None:
        self.scored_on, self.recovery = scored_on, recovery
        self.asked: list[tuple[str, str, int]] = []

    def settings(self, contender: Any) -> str:
        return self.recovery if contender.recovers else self.scored_on

    def row(self, contender: Any) -> dict[str, Any]:
        self.asked.append((contender.kind, contender.label, contender.seed))
        scores = {"WQL": 1.0 + contender.seed / 10, "SQL": 1.0, "MASE": 1.0}
        name = {"kind": contender.kind, "label": contender.label, "seed": contender.seed}
        return {**name, **scores, "settings": self.settings(contender)}


def test_a_comparison_keeps_rows_and_shows_those_that_are_asked_for(
    scripts: Any, tmp_path: Path
) -> None:
    found = list(scripts.comparison.contenders((0, 1), [], [(8, 0.25, 0.5)]))
    everything = [(c.kind, c.label, c.seed) for c in found]
    recovered = [row for row in everything if row[0].endswith(" + recovery")]
    assert {"fold + recovery", "fold, narrower + recovery"} == {row[0] for row in recovered}
    assert {row[0] for row in everything} <= scripts.comparison.STYLES.keys()  # all are drawn
    path, console = tmp_path / "c.csv", Console(quiet=True)

    def asked(scored_on: str, recovery: str) -> tuple[list[tuple[str, str, int]], int]:
        bed = Bench(scored_on, recovery)
        frame, others = scripts.comparison.measure(bed, found, path, console)
        shown = frame[["kind", "label", "seed"]].itertuples(index=False, name=None)
        assert list(shown) == everything  # in that order, whenever they were measured
        assert set(frame["settings"]) == {scored_on, recovery}
        return bed.asked, len(others)

    assert asked("1", "00000001") == (everything, 0)
    assert asked("1", "00000001") == ([], 0)  # all digits, and not read as a number
    assert asked("1", "abcdef01") == (recovered, len(recovered))
    assert asked("1", "00000001") == ([], len(recovered))  # nothing was lost
    assert asked("2", "00000001")[0] == [row for row in everything if row not in recovered]
    pd.read_csv(path, dtype={"settings": str}).iloc[3:].to_csv(path, index=False)
    assert asked("1", "abcdef01")[0] == everything[:3]


def test_settings_of_a_comparison_follow_all_that_a_recovery_resolves_to(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = scripts.comparison
    shapes = comparison.Contender("fold + recovery", "", 0, head_size=4, ff_ratio=0.25)
    whole = comparison.Contender("fold + recovery", "", 0, head_size=32)
    folded = comparison.Contender("fold", "", 0, head_size=4, ff_ratio=0.25)

    def bed(max_series: int | None = None, steps: int = 400) -> Any:
        made = object.__new__(comparison.Bed)
        made.name, made.recovery, made._settings = "m", RecoveryConfig(steps=steps), {}
        made.config = EvaluationConfig(max_series=max_series)
        made.original = load_tiny()
        return made

    def load_tiny() -> Any:
        model = torch.nn.Linear(100, 100)
        forecaster = SimpleNamespace(model_context_length=512, model_prediction_length=64)
        return SimpleNamespace(family="chronos-t5", model=model, forecaster=forecaster)

    def shape(self: Any, name: str) -> Any:
        made = load_tiny()
        made.model = torch.nn.Linear(100, 100 * self.head_size // 64)
        return made

    monkeypatch.setattr(comparison.Contender, "shape", shape)
    base = bed().settings(shapes)
    assert bed().settings(shapes) == base
    assert bed().settings(whole) != base  # half of the parameters are left: another rate
    assert bed(steps=401).settings(shapes) != base
    assert bed(max_series=40).settings(shapes) != base
    assert bed(max_series=40).settings(folded) != bed().settings(folded)
    assert bed(steps=401).settings(folded) == bed().settings(folded)
    family = adapter_of("chronos-t5")
    other = replace(family.defaults, learning_rate_when_small=2e-3)
    monkeypatch.setattr(type(family), "defaults", other)
    assert bed().settings(shapes) != base


def test_a_recovery_that_was_stopped_is_no_row(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = object.__new__(scripts.comparison.Bed)
    bed.name, bed.recovery = "m", RecoveryConfig(steps=400)
    contender = scripts.comparison.Contender("fold + recovery", "", 0, head_size=4)
    ends = iter((True, False))
    monkeypatch.setattr(scripts.comparison.Contender, "compressed", lambda *_: "student")
    monkeypatch.setattr(
        scripts.comparison.tscompress,
        "recover",
        lambda *_: SimpleNamespace(recovery=SimpleNamespace(finished=next(ends))),
    )
    assert bed._fitted(contender).recovery.finished
    with pytest.raises(KeyboardInterrupt):
        bed._fitted(contender)


def test_the_table_of_a_comparison_says_nothing_where_a_metric_was_not_taken(scripts: Any) -> None:
    base = {"parameters": 0.5, "latency": 0.5, "latency low": 0.4, "latency high": 0.6}
    rows = [
        {"kind": "fold", "label": "a", "seed": seed, "WQL": wql, "SQL": sql, "MASE": 1.0, **base}
        for seed, wql, sql in ((0, 1.0, 1.01), (1, 1.1, 1.03))
    ]
    for seed, sql in ((0, 1.0), (1, math.nan)):
        row = {"kind": "svd", "label": "b", "seed": seed, "WQL": 1.2, "SQL": sql, "MASE": 1.0}
        rows.append({**row, **base})
    frame = pd.DataFrame(rows).assign(**{"CPU minutes": 0.0})
    lines = scripts.comparison.markdown(frame).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0][4:7] == ["1.0500 ± 0.0500", "1.0200 ± 0.0100", "1.0000 ± 0.0000"]
    assert cells[1][4:7] == ["1.2000 ± 0.0000", "", "1.0000 ± 0.0000"]


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


DATASET = EvaluationDataset(
    "d",
    1,
    tuple(np.cumsum(1 + np.random.default_rng(5).random((60, 9)), axis=1)),
    (pd.Period("2000Q1", freq="Q"),) * 60,
)


def recovered(trial: Any, seed: int, factor: float) -> dict[str, Any]:
    cells = dict.fromkeys(("WQL before", "SQL before", "SQL", "MASE before"), 1.0)
    loss = {"loss before": 0.1, "loss": 0.0, "series/s": 1.0, "fine-tuning series/s": 1.0}
    name = {"model": "m", "trial": trial.label, "data": "real", "optimizer": "muon", "series": 60}
    rates = {"learning rate": 1e-3, "minutes": 1.0, "parameters": 0.5, "seed": seed}
    return {**name, **rates, **cells, **loss, "WQL": factor, "MASE": factor}


def test_intervals_of_a_recovery_are_of_the_mean_of_its_seeds(scripts: Any) -> None:
    recover = scripts.recover
    before = 1 + np.random.default_rng(0).random(60)
    factors = {0: 0.9, 1: 1.0, 2: 1.25}

    class Bed(recover.Bed):  # type: ignore[misc]
        def __init__(self) -> None:
            self.scores, self.datasets = scores(before), [DATASET]

        def row(self, trial: Any, seed: int, *_: Any) -> Any:
            return recovered(trial, seed, factors[seed]), scores(before * factors[seed])

    trials = [recover.Trial(8, 1.0, 1), recover.Trial(4, 1.0, 1)]
    frame, seen = None, []
    for so_far in recover.rows(Bed(), trials, (0, 1, 2), {}, False):
        frame = recover.merged(frame, pd.DataFrame(so_far))
        seen.append(frame.reindex(columns=["WQL low"])["WQL low"].notna().tolist())
    assert frame is not None
    assert seen[1] == [False, False]
    assert seen[2] == [True] * 3
    assert seen[4] == [True] * 3 + [False] * 2
    assert seen[5] == [True] * 6
    # Every series has the same ratio, so that there is nothing for the series to say.
    for name in ("WQL low", "SQL low", "SQL high", "MASE high"):
        assert frame[name].tolist() == pytest.approx([1.05] * 6, rel=1e-9)
    text = recover.markdown(frame)
    assert text.count("1.0500 (0.9000–1.2500); series 1.0500–1.0500") == 4
    assert text.count("1.0000 (1.0000–1.0000); series 1.0500–1.0500") == 2  # SQL


def test_a_trial_may_leave_layers_out(scripts: Any) -> None:
    trial = scripts.recover.Trial.parse("8,0.25,5,4,2")
    assert trial == scripts.recover.Trial(8, 0.25, 5, (4, 2))
    assert trial.label == "d_kv 8, d_ff 25.0%, 4 + 2 layers"
    assert scripts.recover.Trial.parse("8,1.0,5").layers is None
    narrow = scripts.recover.Trial.parse("8,0.25,5,4,2,d_model=96")
    assert narrow == scripts.recover.Trial(8, 0.25, 5, (4, 2), 96)
    assert narrow.label == "d_model 96, d_kv 8, d_ff 25.0%, 4 + 2 layers"
    assert scripts.fold._size("8,0.25,96") == (8, 0.25, 96)


def test_a_single_series_has_no_interval(scripts: Any) -> None:
    recover = scripts.recover
    bed = object.__new__(recover.Bed)
    one = dataclasses.replace(DATASET, series=DATASET.series[:1], starts=DATASET.starts[:1])
    bed.scores, bed.datasets = scores(np.array([2.0])), [one]
    found = bed.intervals([scores(np.array([1.0]))])
    assert set(found) == {f"{m} {end}" for m in ("WQL", "SQL", "MASE") for end in ("low", "high")}
    assert all(math.isnan(value) for value in found.values())
    row = recovered(recover.Trial(8, 1.0, 1), 0, 0.5)
    assert "series " not in recover.markdown(pd.DataFrame([row | found])).split("60 series")[1]


def test_a_recovery_measured_again_replaces_its_own_row_alone(scripts: Any, tmp_path: Path) -> None:
    recover = scripts.recover
    first, second = recover.Trial(8, 1.0, 1), recover.Trial(4, 1.0, 1)
    path = tmp_path / "r.csv"
    table = [recovered(first, 0, 1.0), recovered(first, 1, 1.1), recovered(second, 0, 1.2)]
    pd.DataFrame(table).to_csv(path, index=False)
    again = pd.DataFrame([recovered(first, 1, 1.3)])
    found = recover.merged(pd.read_csv(path), again)
    assert found["WQL"].tolist() == [1.0, 1.2, 1.3]
    other = pd.DataFrame([recovered(first, 1, 1.4) | {"series": 30}])
    assert recover.merged(found, other)["WQL"].tolist() == [1.0, 1.2, 1.3, 1.4]


@pytest.mark.parametrize("command", ["recover --seed 7", "fold sizes --draw 7"])
def test_calibration_is_not_drawn_as_the_held_out_windows_are(
    scripts: Any, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    monkeypatch.setattr(sys, "argv", [name, *options, "--output", "o"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(name).main()
    assert caught.value.code == 2
    assert "7 is that of the held-out windows" in capsys.readouterr().err


def test_a_table_of_an_earlier_version_is_not_added_to(
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scripts.recover, "Bed", lambda *_: None)
    (tmp_path / "r-bolt.csv").write_text("model,trial,seed\nreference/bolt,a,0\n")
    options = ["--output", str(tmp_path / "r"), "--model", "reference/bolt"]
    monkeypatch.setattr(sys, "argv", ["recover", *options])
    with pytest.raises(SystemExit):
        scripts.recover.main()
    assert "is of an earlier version; take another --output" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Again
# --------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Carries the parser of a script that is about to use it."""


def parser_of(script: Any) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            script.main()
    found: argparse.ArgumentParser = caught.value.args[0]
    return found


def test_every_table_has_a_command_that_its_script_takes(scripts: Any, tmp_path: Path) -> None:
    for table in scripts.reproduce.TABLES:
        _, path, *arguments = table.command(tmp_path)
        parsed = vars(parser_of(getattr(scripts, Path(path).stem)).parse_args(arguments))
        assert parsed["output"].parent == tmp_path
        assert table.name.startswith(parsed["output"].name)
        assert (EVAL / "results" / f"{table.name}.csv").is_file()
        for recipe in table.trained:
            assert f"results/{recipe}/model" in " ".join(arguments)
            assert Path(scripts.reproduce.training(recipe)[4]).is_file()
        assert table.arguments.count("/model") == len(table.trained)


def test_tables_are_chosen_by_parts_of_their_names(scripts: Any) -> None:
    reproduce = scripts.reproduce
    assert reproduce.chosen([]) == list(reproduce.TABLES)
    assert [table.name for table in reproduce.chosen(["shapes", "peers"])] == [
        "peers-bolt", "peers-t5", "shapes",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no table is called 'bert'; --list shows"):
        reproduce.chosen(["t5", "bert"])


def test_a_command_that_fails_is_told_and_the_others_run(
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reproduce = scripts.reproduce
    (tmp_path / "says.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS'])")
    (tmp_path / "fails.py").write_text("import sys; sys.exit('no luck')")
    tables = tuple(
        reproduce.Table(name, f"{tmp_path / script} --output DIR/{name}", 1, threads=threads)
        for name, script, threads in (
            ("bad", "fails.py", 1),
            ("one", "says.py", 1),
            ("two", "says.py", 2),
        )
    )
    monkeypatch.setattr(reproduce, "TABLES", tables)
    output = tmp_path / "again"
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--output", str(output), "--processes", "2"])
    with pytest.raises(SystemExit, match="1"):
        reproduce.main()
    said = capsys.readouterr().out
    assert "bad: exit status 1" in said
    assert "one: done" in said
    logs = {name: (output / f"{name}.log").read_text().strip() for name in ("bad", "one", "two")}
    assert logs == {"bad": "no luck", "one": "1", "two": "2"}


def test_overlap_of_the_likeliest_tokens(scripts: Any) -> None:
    """Jaccard's: 8 of 10 in common are 8 of 12 in all."""
    a = torch.arange(10).expand(2, 1, 10)
    b = torch.stack([torch.arange(10).flip(0)[None], torch.arange(2, 12)[None]])
    assert scripts.table2.overlap(a, b) == pytest.approx((1 + 8 / 12) / 2)


def test_attention_is_cut_at_a_tolerance_and_multiplied_back(
    scripts: Any, checkpoints: dict[str, Path]
) -> None:
    original = load(checkpoints["chronos-t5"], dtype="float32")
    name = original.architecture.attention[0].projections["q"]
    whole = original.model.get_submodule(name).weight.detach().clone()
    assert scripts.table2.truncate_(original, 1e-9)[0] == 1.0
    torch.testing.assert_close(
        original.model.get_submodule(name).weight, whole.bfloat16().float(), rtol=0, atol=0
    )
    share, rank = scripts.table2.truncate_(original, 0.999)
    cut = original.model.get_submodule(name).weight.detach()
    assert rank == 1.0
    assert share == pytest.approx(1 / min(whole.shape))
    assert cut.shape == whole.shape
    sigma = torch.linalg.svdvals(cut)
    assert sigma[1] < 0.02 * sigma[0]  # but for rounding to bfloat16
    series = scripts.table2.windows()
    assert series.shape == (scripts.table2.WINDOWS, scripts.table2.LENGTH)
    tokens = scripts.table2.likeliest(original, series[:2])
    assert scripts.table2.overlap(tokens, tokens) == 1.0
    assert [p[1] for p in scripts.table2.PUBLISHED] == sorted(
        (p[1] for p in scripts.table2.PUBLISHED), reverse=True
    )
