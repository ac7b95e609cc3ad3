"""What the scripts of eval/ keep, measure again and put into their tables."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from eval_scripts import imported
from rich.console import Console

import tscompress
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import TscompressError, UsageError
from tscompress.evaluation.results import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.plotting import new_figure
from tscompress.probing.measure import ProbeConfig
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket

EVAL = Path(__file__).parents[2] / "eval"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Those of tables, imported as one of them that runs is."""
    names = ("comparison", "recover", "reproduce", "fold", "methods", "peers", "family", "shapes",
             "fold_growth", "table2", "calibration", "compressibility", "front",
             "series_files", "finetune", "testbed", "output", "univariate")  # fmt: skip
    with imported(names) as found:
        yield found


class Bench:
    """Stands for a comparison, and notes what it is asked to measure."""

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
    found = list(scripts.comparison.contenders((0, 1), []))
    everything = [(c.kind, c.label, c.seed) for c in found]
    assert len(set(everything)) == len(everything)
    recovered = [(c.kind, c.label, c.seed) for c in found if c.recovers]
    assert {row[0] for row in recovered} == {
        "fold + recovery", "SVD-LLM + recovery", "ASVD + recovery", "distilled from scratch",
    }  # fmt: skip
    assert {row[0] for row in everything} <= scripts.comparison.STYLES.keys()  # all are drawn
    # Whatever shares a latency shares it with one that is there.
    assert {c.shape for c in found} <= {(c.kind, c.label) for c in found if not c.recovers}
    path, console = tmp_path / "c.csv", Console(quiet=True)

    def asked(scored_on: str, recovery: str) -> tuple[list[tuple[str, str, int]], int]:
        bench = Bench(scored_on, recovery)
        frame, others = scripts.comparison.measure(bench, found, path, console)
        shown = frame[["kind", "label", "seed"]].itertuples(index=False, name=None)
        assert list(shown) == everything  # in that order, whenever they were measured
        assert set(frame["settings"]) == {scored_on, recovery}
        return bench.asked, len(others)

    assert asked("1", "00000001") == (everything, 0)
    assert asked("1", "00000001") == ([], 0)  # all digits, and not read as a number
    assert asked("1", "abcdef01") == (recovered, len(recovered))
    assert asked("1", "00000001") == ([], len(recovered))  # nothing was lost
    assert asked("2", "00000001")[0] == [row for row in everything if row not in recovered]
    pd.read_csv(path, dtype={"settings": str}).iloc[3:].to_csv(path, index=False)
    assert asked("1", "abcdef01")[0] == everything[:3]


def tiny_comparison(scripts: Any, directory: Path, steps: int = 2, series: int = 2) -> Any:
    """Of a tiny model, whose recovery and evaluation take seconds."""
    made = scripts.comparison.Comparison(str(directory), series, steps)
    short = Bucket(context_length=32, horizon=8, batch_size=4, weight=1)
    made.recovery = RecoveryConfig(steps=steps, buckets=(short,), held_out_series=8)
    made.bed.config = made.bed.config.model_copy(update={"datasets": ("monash_m1_yearly",)})
    made.bed.probe = ProbeConfig(tasks=("seasons", "trends"), num_series=2)
    little = CalibrationConfig(source="synthetic", num_series=24, context_length=48, batch_size=8)
    for seed in (-1, 0):
        calibration = little.model_copy(update={"seed": max(seed, 0)})
        made.of_seeds[seed] = scripts.comparison.PeerTestbed(
            str(directory), calibration=calibration
        )
    return made


def test_settings_of_a_comparison_follow_all_that_a_recovery_resolves_to(
    scripts: Any, checkpoints: dict[str, Path]
) -> None:
    comparison, size = scripts.comparison, scripts.testbed.Size

    def settings(contender: Any, family: str = "chronos-t5", **options: int) -> str:
        made = tiny_comparison(scripts, checkpoints[family], **options)
        found: str = made.settings(contender)
        return found

    folded, small = (
        list(
            comparison.recovered_too("fold", of, partial(comparison.PeerTestbed.folded, size=of), 0)
        )
        for of in (size(4), size(4, 0.5, 12))
    )
    base = settings(small[1])
    assert settings(small[1]) == base
    assert settings(folded[1]) != base  # more than half of the parameters are left: another rate
    assert settings(small[1], steps=3) != base
    assert settings(small[1], series=3) != base
    assert settings(small[0], series=3) != settings(small[0])
    assert settings(small[0], steps=3) == settings(small[0])


def test_settings_of_a_comparison_follow_the_weights_and_the_bound_of_the_rate(
    scripts: Any, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, size = scripts.comparison, scripts.testbed.Size(4, 0.5, 12)
    made = tiny_comparison(scripts, checkpoints["chronos-bolt"])
    fold, recovered = comparison.recovered_too(
        "fold", size, partial(comparison.PeerTestbed.folded, size=size), 0
    )
    smaller = comparison.Contender(
        "next smaller size", "", partial(comparison.trained_model, str(checkpoints["chronos-t5"]))
    )
    again = comparison.Contender(
        "next smaller size", "", partial(comparison.trained_model, str(checkpoints["chronos-bolt"]))
    )
    of_fold, of_recovered = made.settings(fold), made.settings(recovered)
    assert made.settings(smaller) != made.settings(again)
    monkeypatch.setattr(comparison, "rate_by_distance", lambda *_: 1e-3)
    bounded = tiny_comparison(scripts, checkpoints["chronos-bolt"])
    assert bounded.settings(fold) == of_fold
    assert bounded.settings(recovered) != of_recovered
    changed = tiny_comparison(scripts, checkpoints["chronos-bolt"])
    with torch.no_grad():
        next(changed.bed.original.model.parameters()).add_(1)
    assert changed.settings(fold) != of_fold
    recoded = tiny_comparison(scripts, checkpoints["chronos-bolt"])
    monkeypatch.setattr(scripts.testbed, "code_digest", lambda parts: "another")
    assert recoded.settings(fold) != of_fold


@pytest.mark.parametrize(
    "family", ["chronos-bolt", pytest.param("chronos-t5", marks=pytest.mark.slow)]
)
def test_every_kind_recovers_and_a_stopped_recovery_is_no_row(
    scripts: Any, checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, size = scripts.comparison, scripts.testbed.Size(4, 0.5, 12)
    made = tiny_comparison(scripts, checkpoints[family])
    testbed = comparison.PeerTestbed
    monkeypatch.setattr(testbed, "share_of", lambda *_: 0.8)  # so that some rank is left
    builds = {
        "fold": partial(testbed.folded, size=size),
        "SVD-LLM": partial(testbed.svd_llm, size=size),
        "ASVD": partial(testbed.asvd, size=size),
        comparison.SCRATCH: partial(comparison.with_random_weights, size),
    }
    monkeypatch.setattr(comparison, "LITTLE", made.at_seed(0).calibration)
    for kind, build in builds.items():
        contender = comparison.Contender(kind, "", build, 0, recovers=True)
        before = build(made.at_seed(0)).model.state_dict()
        after = made.fitted(contender).model.state_dict()
        # Of a start no step improves on, the weights of the start are kept.
        assert {name: t.shape for name, t in after.items()} == {
            name: t.shape for name, t in before.items()
        }
    row = made.row(comparison.Contender("fold + recovery", "", builds["fold"], 0, True))
    assert all(math.isfinite(row[name]) for name in ("WQL", "SQL", "MASE", "own skill"))
    monkeypatch.setattr(comparison, "recover_", lambda *_: SimpleNamespace(finished=False))
    with pytest.raises(KeyboardInterrupt):
        made.fitted(contender)


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
def test_random_weights_are_those_of_pretraining_and_follow_the_seed(
    scripts: Any, checkpoints: dict[str, Path], family: str
) -> None:
    def drawn(seed: int) -> Any:
        loaded = load(checkpoints[family], dtype="float32")
        before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
        scripts.comparison.draw_weights_(loaded, seed)
        return loaded, before

    (loaded, before), (again, _), (other, _) = drawn(1), drawn(1), drawn(2)
    name = loaded.architecture.attention[0].projections["v"] + ".weight"
    weights, same, others = (one.model.state_dict()[name] for one in (loaded, again, other))
    assert torch.equal(weights, same)
    assert not torch.equal(weights, others)
    assert not torch.equal(weights, before[name])
    deviation = loaded.model.config.initializer_factor * loaded.model.config.d_model**-0.5
    assert float(weights.std()) == pytest.approx(deviation, rel=0.1)
    if family == "chronos-t5":  # a narrower one starts with logits of the size of a tied head's
        bed = scripts.comparison.PeerTestbed(str(checkpoints[family]))
        narrow = scripts.comparison.with_random_weights(scripts.testbed.Size(4, 0.5, 12), bed)
        head, tokens = narrow.model.lm_head.weight, narrow.model.shared.weight
        torch.testing.assert_close(head, tokens * 12**-0.5)
        table = loaded.model.shared.weight.detach()[2:]
        near = torch.cosine_similarity(table[1:], table[:-1]).mean()
        assert near > torch.cosine_similarity(table[20:], table[:-20]).mean()


def test_points_beyond_a_panel_are_drawn_at_its_edge(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, figures = scripts.comparison, []
    monkeypatch.setattr(
        comparison, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[0]
    )
    alike = {"label": "", "seed": -1, "parameters": 1.0, "latency low": 1, "latency high": 1,
             "CPU minutes": 0.0, "seasons": 1.0, "covariates": 1.0, "own skill": 1.0}  # fmt: skip
    scores = {"dense": (1.0, 1.0), "fold": (1.2, 0.5), "svd": (23.3, -5.0)}
    rows = [
        {
            **alike,
            "kind": kind,
            "latency": 0.5,
            "WQL": loss,
            "SQL": loss,
            "MASE": loss,
            "skill": skill,
        }
        for kind, (loss, skill) in scores.items()
    ]
    comparison.draw(pd.DataFrame(rows), tmp_path / "found.png")
    for axes, (low, high, label) in zip(
        figures[0].axes, [(1.0, 1.6, "> 1.6")] * 2 + [(-0.4, 1.0, "< −0.4")], strict=True
    ):
        points = [y for line in axes.lines for y in line.get_ydata()]
        assert low <= min(points)
        assert max(points) <= high
        assert label in [text.get_text() for text in axes.get_yticklabels()]


def test_unmeasured_metrics_are_empty_cells(scripts: Any) -> None:
    base = {"parameters": 0.5, "latency": 0.5, "latency low": 0.4, "latency high": 0.6}
    base |= {"skill": 0.9, "seasons": 0.8, "own skill": 0.5}
    rows = [
        {"kind": "fold", "label": "a", "seed": seed, "WQL": wql, "SQL": sql, "MASE": 1.0, **base}
        for seed, wql, sql in ((0, 1.0, 1.01), (1, 1.1, 1.03))
    ]
    for seed, sql in ((0, 1.0), (1, math.nan)):
        row = {"kind": "svd", "label": "b", "seed": seed, "WQL": 1.2, "SQL": sql, "MASE": 1.0}
        rows.append({**row, **base})
    frame = pd.DataFrame(rows).assign(**{"CPU minutes": 0.0})
    lines = scripts.comparison.markdown(frame).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(row) for row in cells}) == 1
    assert cells[2][4:7] == ["1.0500 ± 0.0500", "1.0200 ± 0.0100", "1.0000 ± 0.0000"]
    assert cells[3][4:7] == ["1.2000 ± 0.0000", "", "1.0000 ± 0.0000"]
    assert cells[2][7] == "0.900 ± 0.000"


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
    cells |= dict.fromkeys(("skill before", "skill", "seasons before", "seasons"), 0.75)
    loss = {"loss before": 0.1, "loss": 0.0, "series/s": 1.0, "fine-tuning series/s": 1.0}
    loss |= {"CPU minutes": 0.9}
    name = {"model": "m", "trial": trial.label, "data": "real", "optimizer": "muon", "series": 60}
    rates = {"learning rate": "default", "bound": trial.bound, "parameters": 0.5, "seed": seed}
    return {**name, **rates, **cells, **loss, "WQL": factor, "MASE": factor}


def trial_of(scripts: Any, head_size: int) -> Any:
    return scripts.recover.Trial(scripts.testbed.Size(head_size), 1)


def test_intervals_of_a_recovery_are_of_the_mean_of_its_seeds(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = scripts.recover
    before = 1 + np.random.default_rng(0).random(60)
    factors = {0: 0.9, 1: 1.0, 2: 1.25}
    bed = SimpleNamespace(scores=scores(before), datasets=[DATASET])
    monkeypatch.setattr(
        recover,
        "row",
        lambda bed, trial, seed, *_: (
            recovered(trial, seed, factors[seed]),
            scores(before * factors[seed]),
        ),
    )
    trials = [trial_of(scripts, 8), trial_of(scripts, 4)]
    frame, seen = None, []
    for so_far in recover.rows(bed, trials, (0, 1, 2), {}):
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
    assert text.count("0.7500 (0.7500–0.7500)") == 8  # skill and seasons, before and after
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_a_trial_may_leave_layers_out(scripts: Any) -> None:
    size = scripts.testbed.Size
    trial = scripts.recover.Trial.parse("8,0.25,5,4,2")
    assert trial == scripts.recover.Trial(size(8, 0.25), 5, (4, 2))
    assert trial.label == "d_kv 8, d_ff 25%, 4 + 2 layers"
    assert scripts.recover.Trial.parse("8,1.0,5").layers is None
    narrow = scripts.recover.Trial.parse("8,0.25,5,4,2,d_model=96")
    assert narrow == scripts.recover.Trial(size(8, 0.25, 96), 5, (4, 2))
    assert narrow.label == "d_model 96, d_kv 8, d_ff 25%, 4 + 2 layers"
    beside = scripts.recover.Trial.parse("parameters=0.3,10,d_model=96")
    assert (beside.width, beside.label) == (96, "parameters=0.3 by layer, d_model 96")
    assert (trial.bound, trial.steps) == ("5 minutes", None)
    in_steps = scripts.recover.Trial.parse("8,0.25,1200steps,4,2")
    assert in_steps == scripts.recover.Trial(size(8, 0.25), layers=(4, 2), steps=1200)
    assert (in_steps.bound, in_steps.minutes) == ("1200 steps", None)
    by_layer = scripts.recover.Trial.parse("parameters=0.3,10")
    assert by_layer.width is None
    assert (str(by_layer.size), by_layer.minutes) == ("parameters=0.3", 10)
    assert by_layer.label == "parameters=0.3 by layer"
    assert size.parse("8,0.25,96") == size(8, 0.25, 96)
    assert size.parse("64,0.125").label == "d_kv 64, d_ff 12.5%"


def test_a_single_series_has_no_interval(scripts: Any) -> None:
    recover = scripts.recover
    one = dataclasses.replace(DATASET, series=DATASET.series[:1], starts=DATASET.starts[:1])
    bed = SimpleNamespace(scores=scores(np.array([2.0])), datasets=[one])
    found = recover.intervals(bed, [scores(np.array([1.0]))])
    assert set(found) == {f"{m} {end}" for m in ("WQL", "SQL", "MASE") for end in ("low", "high")}
    assert all(math.isnan(value) for value in found.values())
    row = recovered(trial_of(scripts, 8), 0, 0.5)
    assert "series " not in recover.markdown(pd.DataFrame([row | found])).split("60 series")[1]


def test_a_recovery_measured_again_replaces_its_own_row_alone(scripts: Any, tmp_path: Path) -> None:
    recover = scripts.recover
    first, second = trial_of(scripts, 8), trial_of(scripts, 4)
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
    monkeypatch.setattr(scripts.recover, "Testbed", lambda *_: None)
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


def test_every_table_has_a_command_that_its_script_takes(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.output, "check_device", str)  # that of tables that need a GPU
    page = (EVAL / "README.md").read_text(encoding="utf-8")
    for table in scripts.reproduce.TABLES:
        _, path, *arguments = table.command(tmp_path)
        script = importlib.import_module(Path(path).stem)
        parsed = vars(parser_of(script).parse_args(arguments))
        assert parsed["output"].parent == tmp_path
        assert table.name.startswith(parsed["output"].name)
        assert f"`{table.name}`" in page
        for recipe in table.trained:
            assert f"results/{recipe}" in " ".join(arguments)
            assert Path(scripts.reproduce.training(recipe)[4]).is_file()
        assert table.arguments.count("results/") == len(table.trained)
        assert set(table.drawn_from) <= {other.name for other in scripts.reproduce.TABLES}
        if table.has_quick:
            look = table.command(tmp_path, quick=True)[2:]
            assert vars(parser_of(script).parse_args(look)) == {**parsed, "quick": True}


def test_every_script_of_the_lab_that_measures_is_a_table_and_has_a_quick_run(scripts: Any) -> None:
    tables = scripts.reproduce.chosen(["lab"], quick=True)
    assert tables == scripts.reproduce.chosen(["lab"])
    scripts_of_tables = {Path(table.command(Path())[1]).name for table in tables}
    measuring = {
        path.name for path in (EVAL / "lab").glob("*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }  # fmt: skip
    assert scripts_of_tables == measuring - {"modality_models.py"}


@pytest.mark.parametrize("name", ["fold", "methods", "peers", "budgets", "table2"])
def test_models_are_scored_on_the_device_that_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def stop(*_: Any, device: str, **__: Any) -> None:
        raise Asked(device)

    with imported(("output", "testbed", "peer_methods", name)) as found:
        script = getattr(found, name)
        monkeypatch.setattr(found.output, "check_device", str)
        monkeypatch.setattr(script, "PeerTestbed" if name == "peers" else "Testbed", stop)
        own = {"fold": ["widths"], "budgets": ["--models", str(tmp_path / "m")]}.get(name, [])
        options = [*own, "--model", "reference/t5", "--output", str(tmp_path / "t")]
        monkeypatch.setattr(sys, "argv", [name, *options, "--device", "cuda"])
        with pytest.raises(Asked) as asked:
            script.main()
        assert asked.value.args == ("cuda",)


def test_ratios_far_apart_are_drawn_by_orders_of_magnitude(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    with imported(("methods",)) as found:
        new_figure = found.methods.new_figure
        monkeypatch.setattr(
            found.methods, "new_figure", lambda *size: shown.append(new_figure(*size)) or shown[-1]
        )
        for worst in (2.0, 31.0):
            rows = [(1.0, 1.0, 1.0, 0.9, "fold"), (0.9, worst, worst, -1.0, "svd")]
            frame = pd.DataFrame(rows, columns=["latency", "WQL", "MASE", "skill", "method"])
            found.methods.figure(frame, tmp_path / "f.png")
    scales = [[axes.get_yscale() for axes in figure.axes[:3]] for figure in shown]
    assert scales == [["linear"] * 3, ["log", "log", "linear"]]
    assert shown[1].axes[0].get_ylim()[1] > 31


def test_tables_are_chosen_by_parts_of_their_names(scripts: Any) -> None:
    reproduce = scripts.reproduce
    assert reproduce.chosen([]) == [table for table in reproduce.TABLES if not table.needs_gpu]
    assert [table.name for table in reproduce.chosen(["shapes-", "peers", "lab-heads"])] == [
        "peers-bolt", "peers-t5", "peers-chronos2", "shapes-chronos2", "lab-heads",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no table is called 'bert'; --list shows"):
        reproduce.chosen(["t5", "bert"])
    assert [table.name for table in reproduce.chosen(["shapes"])] == ["shapes"]
    assert [table.name for table in reproduce.chosen(["series-files", "hapes"], quick=True)] == [
        "shapes", "shapes-chronos2", "exported-shapes",
    ]  # fmt: skip
    with pytest.raises(UsageError):
        reproduce.chosen(["series-files"], quick=True)


def test_failed_command_is_reported_and_others_run(
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reproduce = scripts.reproduce
    (tmp_path / "says.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS'])")
    (tmp_path / "fails.py").write_text("import sys; sys.exit('no luck')")
    (tmp_path / "draws.py").write_text(
        "import pathlib, sys; print(pathlib.Path(sys.argv[1], 'one.log').read_text())"
    )
    drawn = reproduce.Table("drawn", f"{tmp_path / 'draws.py'} DIR", 1, drawn_from=("one",))
    measured = (
        reproduce.Table(name, f"{tmp_path / script} --output DIR/{name}", 1, threads=threads)
        for name, script, threads in (
            ("bad", "fails.py", 1),
            ("one", "says.py", 1),
            ("two", "says.py", 2),
        )
    )
    tables = (drawn, *measured)
    monkeypatch.setattr(reproduce, "TABLES", tables)
    output = tmp_path / "again"
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--output", str(output), "--processes", "2"])
    with pytest.raises(SystemExit, match="1"):
        reproduce.main()
    said = capsys.readouterr().out
    assert "bad: exit status 1" in said
    assert "one: done" in said
    logs = {path.stem: path.read_text().strip() for path in output.glob("*.log")}
    assert logs == {"bad": "no luck", "one": "1", "two": "2", "drawn": "1"}


def test_tables_of_what_times_models_run_alone(scripts: Any) -> None:
    reproduce = scripts.reproduce
    folder = reproduce.ROOT / "eval"
    timing = {
        path.name for path in folder.glob("*.py") if "benchmark.bench import" in path.read_text()
    }
    used = {table.arguments.split()[0]: table.has_times for table in reproduce.TABLES}
    assert {script for script in timing & used.keys() if not used[script]} == set()
    assert timing & used.keys()
    assert used["recover.py"]  # for some minutes of the clock
    assert not used["fold.py"]


def test_univariate_sizes_and_parity(scripts: Any, tmp_path: Path) -> None:
    shape = scripts.univariate.SHAPES["tiny"].model_copy(
        update={"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}
    )
    original = scripts.univariate.random_checkpoint(shape, tmp_path / "original")
    small = tmp_path / "small"
    tscompress.save(
        tscompress.compress(original, fold=tscompress.FoldConfig(univariate=True)), small
    )
    assert scripts.univariate.largest_difference(original, original) == 0
    assert 0 < scripts.univariate.largest_difference(small, original) < 1e-5
    lines = scripts.univariate.sizes(original, small).splitlines()
    counts = [int(word.replace(",", "")) for word in lines[0].split()[1:4:2]]
    assert counts[0] - counts[1] == 4 * 32 * 32 - 32 * 32


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


@pytest.mark.parametrize(
    ("name", "code", "out", "err", "answer"),
    [
        ("series", 0, "x.csv: 3 series\nlayout: long\n", "", "3 series"),
        ("compress", 0, "small\n", "series: 3 series\nnote: few\n", "3 series"),
        (
            "compress",
            1,
            "",
            "error: 'x.csv' cannot be read.\n",
            "refused (1): 'x.csv' cannot be read.",
        ),
        ("compress", 0, "small\n", "", None),
        ("compress", 1, "", "Traceback\nerror: KeyError\n", None),
        ("compress", 1, "", "series: 3 series\nerror: later\n", None),
    ],
)
def test_a_command_on_a_file_says_one_thing(
    scripts: Any, name: str, code: int, out: str, err: str, answer: str | None
) -> None:
    said = partial(scripts.series_files.said, name, "x.csv", code, out, err)
    if answer is None:
        with pytest.raises(TscompressError):
            said()
    else:
        assert said() == answer


def test_commands_that_disagree_about_a_file_are_told_apart(scripts: Any) -> None:
    files = scripts.series_files
    labels = {"layout": "long", "separator": ",", "dates": "", "encoding": "", "defect": "",
              "options": ""}  # fmt: skip
    answers = dict.fromkeys((*files.COMMANDS, "read_series"), "3 series")
    rows = [
        {"file": "long.csv", **labels, "weights": "aa", "agree": True, **answers},
        {
            "file": "wide.csv",
            **labels,
            "weights": "bb",
            "agree": False,
            **answers,
            "run": "4 series",
        },
    ]
    text = files.markdown(pd.DataFrame(rows))
    assert "agree on 1." in text
    assert "2 hashes" in text
    assert "run: 4 series" in text


# --------------------------------------------------------------------------------------------------
# Fine-tuning
# --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_models_are_trained_saved_opened_and_scored(
    scripts: Any, checkpoints: dict[str, Path], family: str
) -> None:
    if family == "chronos-2":
        pytest.importorskip("peft")
    finetune = scripts.finetune
    steps = 2 * finetune.WEEK
    hours = pd.date_range("2013-01-01", periods=steps, freq="h")
    values = np.arange(steps) % 24 + np.random.default_rng(0).normal(size=steps)
    frame = pd.concat(
        pd.DataFrame({"series": name, "hour": hours, "departures": scale * values})
        for name, scale in (("A", 3), ("B", 9))
    )
    little = CalibrationConfig(source="synthetic", num_series=8, context_length=32)
    bed = scripts.testbed.Testbed(str(checkpoints[family]), calibration=little)
    training = finetune.Training(
        horizon=7, windows=2, context_length=32, steps=2, batch_size=4, rate=1e-2
    )
    rows = finetune.rows(bed, [scripts.testbed.Size(4, 0.5)], frame, training)
    naive, original = next(rows), next(rows)
    assert set(naive) == {"model", "WQL before", "MASE before"}
    *_, small = rows
    assert original["parameters"] == 1 > small["parameters"]
    assert small["training"] == ("loop" if family == "chronos-bolt" else "lora")
    for row in (original, small):
        assert row["WQL after"] != row["WQL before"]
        assert row["opened again"] < 1e-4
    assert small["WQL before"] != original["WQL before"]
    table = finetune.markdown(pd.DataFrame([naive, original, small]), "tiny")
    assert len(table.splitlines()) == 5


def test_nothing_is_learnt_from_what_is_forecast(scripts: Any) -> None:
    finetune = scripts.finetune
    frame = pd.DataFrame({"series": "A", "hour": range(60), "departures": range(60)})
    training = finetune.Training(horizon=7, windows=1, context_length=32, steps=20, batch_size=4)
    series = finetune.series_of(frame, training.held_out)
    assert [one.tolist() for one in series] == [list(range(53))]
    batches = list(finetune.batches(series, training))
    assert len(batches) == 20
    latest = max(float(batch.target.max()) for batch in batches)
    assert 46 < latest <= 52
    assert all((batch.target[:, 0] == batch.context[:, -1] + 1).all() for batch in batches)
