"""Libraries that load Chronos models, each installed from the registry, on what tscompress writes.

The heavy ones, darts and AutoGluon, are left to ``python eval/ecosystem/run.py``. Environments take
minutes to install; ``TSCOMPRESS_ENVIRONMENTS=DIR`` keeps them for the next run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pandas as pd
import pytest
from shared_fixtures import ROOT

SCRIPT = ROOT / "eval" / "ecosystem" / "run.py"
LIGHT = ("stock", "gluonts", "fev", "sktime")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """What the libraries made of the checkpoints."""
    root = tmp_path_factory.mktemp("ecosystem")
    environments = os.environ.get("TSCOMPRESS_ENVIRONMENTS", root / "environments")
    command = [sys.executable, SCRIPT, "--environments", environments, "--output", root / "table"]
    chosen = [word for name in LIGHT for word in ("--only", name)]
    result = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return pd.read_csv(root / "table.csv")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folded", "narrower"])
def test_folded_checkpoints_forecast_the_same_in_every_library(
    rows: pd.DataFrame, kind: str
) -> None:
    folded = rows[rows["kind"] == kind]
    assert set(folded["library"]) == set(LIGHT)
    assert set(folded["family"]) == {"chronos-t5", "chronos-bolt", "chronos-2"}
    # The copy of Bolt inside sktime also scales the series in bfloat16.
    copy = (folded["family"] == "chronos-bolt") & folded["way"].str.contains("own copy, bfloat16")
    assert copy.sum() == 1
    assert set(folded.loc[copy, "result"]) == {"equal to bfloat16"}
    assert set(folded.loc[~copy, "result"]) == {"bit-equal"}


@pytest.mark.slow
def test_factored_checkpoints_are_refused_and_never_misread(rows: pd.DataFrame) -> None:
    factored = rows[rows["kind"] == "factored"]
    before, after = (factored[factored["registered"] == flag] for flag in (False, True))
    assert set(before["library"]) == set(after["library"]) == set(LIGHT)
    assert set(before["result"]) == {"refused"}
    assert set(after["result"]) <= {"refused", "bit-equal"}
    # Whatever asks BaseChronosPipeline, as chronos' own documentation does, opens them then.
    by_config = after[after["library"].isin(["gluonts", "fev"])]
    assert set(by_config["result"]) == {"bit-equal"}
