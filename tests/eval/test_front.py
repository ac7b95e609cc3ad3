"""What the scripts of eval/ share, and the figure of the front page."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from eval_scripts import imported
from known_skill import result_of

from tscompress.probing.measure import ProbeConfig


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Imported as they are where one of them runs."""
    with imported(("testbed", "front", "output")) as found:
        yield found


def test_a_model_keeps_all_of_its_own_skill(scripts: Any, checkpoints: dict[str, Path]) -> None:
    testbed = scripts.testbed
    bed = testbed.Testbed(str(checkpoints["chronos-bolt"]), 2, datasets=("monash_m1_yearly",))
    bed.probe = ProbeConfig(tasks=("seasons", "trends"), num_series=2)
    own = testbed.skills_kept(bed.skills, bed.skills)
    assert set(own) == {"skill", "skill low", "skill high", "seasons", "covariates"}
    # A random model can do no task, so that there is nothing to keep.
    assert all(math.isnan(value) or value == 1 for value in own.values())
    row = bed.row(bed.original.forecaster, "copy")
    assert set(row) == set(bed.original_row())
    assert all(row[metric] == 1 for metric in testbed.RATIOS)
    assert testbed.PROBES["chronos-t5"].num_series < 16


def test_kept_skill_is_a_share_of_what_the_original_can_do(scripts: Any) -> None:
    original = {"period-4": 0.8, "period-7": 0.0, "linear-trend": 1.0}
    left = {"period-4": 0.4, "period-7": 1.0, "linear-trend": 1.0}
    kept = scripts.testbed.skills_kept(result_of("small", left), result_of("big", original))
    assert kept["seasons"] == pytest.approx(0.5)
    assert kept["skill"] == pytest.approx(1.4 / 1.8)
    assert kept["skill low"] <= kept["skill"] <= kept["skill high"]
    assert math.isnan(kept["covariates"])


def test_a_model_forecasts_on_the_device_and_comes_back(
    scripts: Any, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = scripts.testbed.Testbed(str(checkpoints["chronos-bolt"]), 2, device="cuda")
    pipeline = bed.original.forecaster
    places: list[torch.device] = []
    monkeypatch.setattr(pipeline.inner_model, "to", places.append)
    monkeypatch.setattr(scripts.testbed, "score", lambda *_, **__: list(places))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert bed.score(pipeline, "there") == [cuda]
    assert places == [cuda, cpu]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(scripts.testbed, "probe", fail)
    with pytest.raises(RuntimeError):
        bed.probed(pipeline)
    assert places == [cuda, cpu] * 2


def test_models_of_others_forecast_where_they_are(scripts: Any) -> None:
    class Given:
        inner_model = torch.nn.Linear(1, 1)

    with scripts.testbed.forecasting_on(torch.device("meta"), Given()):
        assert not Given.inner_model.weight.is_meta


@pytest.mark.parametrize("device", ["cuda", "abacus"])
def test_a_device_that_is_not_there_is_one_line(
    scripts: Any, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = scripts.output.parser_of("What it does.", device=True)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--device", device])
    assert stop.value.code == 2
    assert device in capsys.readouterr().err.splitlines()[-1]


def test_intervals_are_shown_where_they_were_taken(scripts: Any) -> None:
    row = {"WQL": 1.0021, "WQL low": 0.9987, "WQL high": 1.0055, "skill": 0.9, "skill low": np.nan}
    show = scripts.testbed.with_interval
    assert show(row, "WQL") == "1.0021 (0.9987–1.0055)"
    assert show(row, "skill", 3) == "0.900"
    assert show(row, "SQL") == ""


def front_tables(scripts: Any, directory: Path) -> None:
    """What `peers.py` and `comparison.py` leave, of made-up measurements."""
    rows = [("dense", "", 1.0, 1.0, True), ("next smaller size", "nano", 0.3, 1.03, True)]
    for index, size in enumerate(scripts.testbed.FRONT_SIZES):
        for kind, loss in (("fold", 0.04), ("fold + recovery", 0.01)):
            worse = 1 + loss * index
            rows.append((kind, size.label, 0.5 - 0.07 * index, worse, True))
    rows.append(("fold", "d_model 128, d_kv 16, d_ff 50%", 0.3, 1.5, True))
    rows.append(("SVD-LLM + recovery", "a", 0.5, 1.02, True))
    rows.append(("fold + recovery", scripts.testbed.FRONT_SIZES[0].label, 0.5, 9.0, False))
    columns = ["kind", "label", "latency", "WQL", "shown"]
    for name, content in (
        ("comparison", rows),
        ("peers", [("Fracast-0", "", 34.0, 0.95, True), ("fold", "a", 0.5, 2.0, True)]),
    ):
        frame = pd.DataFrame(content, columns=columns)
        frame = frame.assign(MASE=frame["WQL"], skill=2 - frame["WQL"])
        frame.to_csv(directory / f"{name}-bolt.csv", index=False)


def run_front(scripts: Any, directory: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--tables", str(directory), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["front.py", *options])
    scripts.front.main()


def test_the_front_page_figure_names_every_kind_once_a_panel(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_tables(scripts, tmp_path)
    front = scripts.front
    found = front.points(*(front.read(tmp_path / f"{n}-bolt.csv") for n in ("comparison", "peers")))
    assert set(found["kind"]) == set(front.LOOKS)
    assert found["WQL"].max() < 1.5  # heads of 16 and rows of another recovery are left out
    assert (found["kind"] == "fold").sum() == len(scripts.testbed.FRONT_SIZES)
    run_front(scripts, tmp_path, tmp_path / "front", monkeypatch)
    png, svg = tmp_path / "front-bolt.png", tmp_path / "front-bolt.svg"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert max(png.stat().st_size, svg.stat().st_size) <= 200 * 1024
    drawn = svg.read_text(encoding="utf-8")
    assert drawn.count("<!-- SVD-LLM, recovered -->") == len(front.MEASURES)
    assert drawn.count("<!-- Fracast-0, 34 × the time →") == len(front.MEASURES)

    (tmp_path / "peers-bolt.csv").unlink()
    run_front(scripts, tmp_path, tmp_path / "alone", monkeypatch)
    assert "Fracast-0" not in (tmp_path / "alone-bolt.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("missing", ["file", "column"])
def test_the_front_page_figure_needs_tables_that_have_the_skill(
    scripts: Any,
    tmp_path: Path,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    front_tables(scripts, tmp_path)
    table = tmp_path / "comparison-bolt.csv"
    if missing == "file":
        table.unlink()
    else:
        pd.read_csv(table).drop(columns="skill").to_csv(table, index=False)
    with pytest.raises(SystemExit) as caught:
        run_front(scripts, tmp_path, tmp_path / "front", monkeypatch)
    assert caught.value.code == 1
    assert "eval/reproduce.py comparison-bolt" in capsys.readouterr().err
