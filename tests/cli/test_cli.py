"""The command: exit codes, one line for each failure, and JSON for machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
import yaml
from families_of_tests import any_family, two_stacks
from forked import Program
from safetensors import safe_open
from shared_fixtures import Command, Forbid, Outcome, assert_refused, hear_ctrl_c, tiny_recipe

import tscompress
from tscompress._version import __version__
from tscompress.benchmark.sizes import parameter_count
from tscompress.budget.sensitivity import Sensitivity
from tscompress.checkpoints import given
from tscompress.checkpoints.load import load
from tscompress.cli import app as cli
from tscompress.cli.console import duration, progress_bars, show, training_progress
from tscompress.data.streaming import iterate_series
from tscompress.errors import DataError, OutputExistsError, PlanError
from tscompress.families.registry import adapter_of
from tscompress.plan.plan import Plan
from tscompress.progress import TimeLeft
from tscompress.training.pretrain_recipe import Stage
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_state import RecoveryProgress
from tscompress.training.windows import Bucket
from tscompress.workflows.recipe import load_recipe, series_files
from tscompress.workflows.save import save

CALIBRATE = ("--calibration-series", "6")
PLAN_FILES = {"config.json", "model.safetensors", "plan.json", "provenance.json", "recipe.yaml"}
GENERATION = "generation_config.json"


@pytest.fixture
def bolt(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["chronos-bolt"]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if
            p.is_file()}  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Around the commands
# --------------------------------------------------------------------------------------------------


def test_version_and_help(command: Command) -> None:
    assert command("--version") == Outcome(0, f"tscompress {__version__}\n", "")
    for arguments in (["--help"], ["compress", "--help"]):
        outcome = command(*arguments)
        assert outcome.code == 0
        assert "Usage: tscompress" in outcome.out
        assert outcome.err == ""
    assert "tscompress profile reference/bolt" in command("--help").out
    without = command("--debug")
    assert (without.code, without.out.strip()) == (2, command("--help").out.strip())


@pytest.mark.parametrize(
    "arguments",
    [
        ("compres",),
        ("compress",),
        ("compress", "reference/bolt"),
        ("compress", "x", "--output", "y", "--rank", "three"),
        ("compress", "x", "--output", "y", "--rank", "3", "--calibration-series", "0"),
        ("evaluate", "x", "--max-series", "0"),
        ("compare",),
        ("bench", "x", "--horizon", "-1"),
        ("diff", "one"),
        ("--nonsense",),
    ],
)
def test_usage_errors_exit_with_2(command: Command, arguments: tuple[str, ...]) -> None:
    outcome = command(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Error" in outcome.err
    assert "Traceback" not in outcome.err


def test_debug_lets_the_traceback_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    arguments = ["diff", str(tmp_path / "none.json"), str(tmp_path / "none.json")]
    assert_refused(command(*arguments), 2, "there is no plan at")
    monkeypatch.setattr(sys, "argv", ["tscompress", "--debug", *arguments])
    with pytest.raises(PlanError, match="there is no plan at"):
        cli.main()
    assert_refused(command(*arguments), 2, "there is no plan at")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "stopped; nothing half-written was kept."),
        (OSError(28, "No space left on device", "out"), 1,
         "error: No space left on device: out"),
        (RuntimeError("first\nsecond"), 1,
         "error: unexpected RuntimeError: first; see --debug"),
        (ZeroDivisionError(), 1, "error: unexpected ZeroDivisionError: ; see --debug"),
    ],
)  # fmt: skip
def test_notes_on_the_way(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    raised: BaseException, code: int, line: str,
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("tscompress.workflows.compress.compress_loaded_", fail)
    surprised = "unexpected" in line
    outcome = command(
        "compress", bolt, "--output", tmp_path / "out", "--rank", 3, surprised=surprised
    )
    *before, last = outcome.err.strip().splitlines()
    assert (outcome.code, outcome.out, last) == (code, "", line)
    assert len(before) == 1
    assert before[0].startswith("memory, about: ")
    assert not (tmp_path / "out").exists()


SVD = ("--method", "svd", "--rank", 3)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("module", "seconds"),
    [
        ("tscompress.cli.interrupts", 0.0),  # before that Python is not ours
        pytest.param("tscompress.cli.interrupts", 0.3, marks=pytest.mark.slow),
        ("tscompress.cli.interrupts", 1.5),
        ("torch.autograd.gradcheck", 0.002),  # the native part of torch imports it
    ],
)
def test_ctrl_c_while_it_imports(tmp_path: Path, module: str, seconds: float) -> None:
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "tscompress", "compress", "reference/bolt",
         "--method", "svd", "--rank", "4", "--output", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stdout is not None
    try:
        for line in child.stderr:
            if line.rstrip("\n").split("|")[-1].strip() == module:
                break
        if module == "tscompress.cli.interrupts":
            child.stderr.readline()  # of what is imported after it
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        # Through the stream that lines were read from, which may hold half of the next one.
        err, out = child.stderr.read(), child.stdout.read()
        child.communicate()
    finally:
        child.kill()
    # Python ends itself by the signal if it came while a string was executed; a shell says 130.
    assert child.returncode in (130, -signal.SIGINT)
    said = [line for line in err.splitlines() if not line.startswith(("import time:", "memory,"))]
    assert (out, said) == ("", ["stopped; nothing half-written was kept."])
    assert list(tmp_path.iterdir()) == []


SWALLOWS = """
import sys, time
from tscompress.checkpoints import load as loading
from tscompress.cli import app as cli, interrupts

def swallow(*_, **__):
    cleaned = 0
    for _ in range(2):
        try:
            if not cleaned:
                print("works", flush=True)
            while True:
                time.sleep(0.05)
        except KeyboardInterrupt:
            try:
                time.sleep(0.5)  # it is left to clean up
                cleaned += 1
                print(cleaned, flush=True)
            except KeyboardInterrupt:
                cleaned = -9
    while True:
        time.sleep(0.05)

loading.find = swallow
interrupts.listen()
cli.main()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no such signals")
def test_ctrl_c_that_a_library_swallows_comes_again(tmp_path: Path) -> None:
    program = Program(("profile", "reference/bolt", "--weights-only"), tmp_path, SWALLOWS)
    with program.started() as process:
        program.interrupt(process, after="works\n")
        code, out, err = program.finish(process)
    assert (code, out) == (130, b"works\n1\n2\n")
    assert err == b"stopped; nothing half-written was kept.\n"


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from tscompress.cli import interrupts\n"
        "interrupts.listen(); signal.raise_signal(signal.SIGINT)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("machine", [(), ("--json",)])
def test_a_result_that_cannot_be_printed(
    bolt: Path, tmp_path: Path, machine: tuple[str, ...]
) -> None:
    arguments = ("compress", str(bolt), *map(str, SVD), *machine, "--output")
    places = {"full": "/dev/full"} if machine else {"full": "/dev/full", "pipe": ""}
    for name, where in places.items():
        output = tmp_path / name
        program = Program((*arguments, str(output)), tmp_path / f"said-{name}", out=where)
        code, _, err = program.run()
        first, *more = err.decode().splitlines()
        assert first.startswith("memory, about: ")
        if name == "full":
            said = "error: the result could not be printed: No space left on device; "
            assert (code, [line.startswith(said) for line in more]) == (1, [True])
        else:
            assert (code, more) == (141, [])
        assert load(output).plan is not None


@pytest.mark.parametrize("machine", [(), ("--json",)])
def test_characters_outside_the_encoding_are_question_marks(
    bolt: Path, tmp_path: Path, machine: tuple[str, ...]
) -> None:
    arguments = ("profile", str(bolt), "--weights-only", *machine)
    code, out, err = Program(arguments, tmp_path, encoding="ascii").run()
    assert (code, err) == (0, b"")
    assert (b"?" in out) == (not machine)
    out.decode("ascii")


def test_refusals_with_characters_outside_the_encoding(tmp_path: Path) -> None:
    code, _, err = Program(("profile", "/none/\udcff"), tmp_path, encoding="ascii").run()
    assert code == 1
    assert err.startswith(b"error: there is no directory ")


# --------------------------------------------------------------------------------------------------
# Outputs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["", ".", "x/..", "b\udcff"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_impossible_outputs_are_refused_before_any_work(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbid: Forbid,
    output: str, force: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    forbid("tscompress.checkpoints.load.find")
    text = {"": "an empty path was given", "b\udcff": "is no name in UTF-8"}.get(
        output, "is or holds the home or the working directory"
    )
    for arguments in (
        ("compress", bolt, *SVD),
        ("profile", bolt, "--weights-only"),
        ("evaluate", bolt, *DATA),
        ("recover", bolt, "--teacher", bolt),
    ):
        assert_refused(command(*arguments, "--output", output, *force), 2, text)
    assert list(tmp_path.iterdir()) == []
    recipe = {"model": str(bolt), "output": "", "profile": None, "evaluation": None}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert_refused(command("run", "recipe.yaml"), 2, "an empty path was given")


def test_a_dry_run_writes_nothing_and_may_be_anywhere(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command("compress", bolt, *SVD, "--dry-run", "--output", ".")
    assert (outcome.code, list(tmp_path.iterdir())) == (0, [])


NOBODY = "~no-such-user"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("evaluate", "--suite", f"{NOBODY}/s.csv", "--horizon", "3"), 1, f"no file '{NOBODY}"),
        (("evaluate", "--suite", f"{NOBODY}/s.yaml"), 2, f"no suite '{NOBODY}"),
        (("evaluate", "--suite", "in-domain", "--root", NOBODY), 1, f"in {NOBODY}"),
        (
            ("compress", "--rank", "8", "--series", f"{NOBODY}/s.csv", "--output", "small"),
            1,
            f"no file '{NOBODY}",
        ),
    ],
    ids=["file", "suite", "root", "series"],
)
def test_the_home_of_nobody(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    """A user that there is not: the path stays as it is, as in a shell."""
    monkeypatch.chdir(tmp_path)
    assert_refused(command(arguments[0], "reference/bolt", *arguments[1:]), code, text)
    assert not list(tmp_path.iterdir())


def test_series_of_nobody_and_those_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    sources = (str(tmp_path), f"{NOBODY}/s", "owner/name")
    found = series_files(RecoveryConfig(series=sources))
    assert found == [str(tmp_path), tmp_path / "a.csv", *sources[1:]]
    with pytest.raises(DataError, match="no-such-user"):
        next(iter(iterate_series(f"{NOBODY}/s.csv")))


def test_a_tilde_is_the_home_everywhere(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    shutil.copytree(bolt, home / "bolt")
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    recipe = {
        "model": "~/bolt",
        "output": "~/run",
        "method": "svd",
        "schedule": {"kind": "rank", "rank": 2},
        "profile": None,
        "evaluation": None,
        "bench": None,
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for arguments in (
        ("compress", "~/bolt", *SVD, "--output", "~/small"),
        ("compress", "~/bolt", "--plan", "~/small/plan.json", "--output", "~/again"),
        ("compress", "~/bolt", "--recipe", "~/recipe.yaml", "--output", "~/third"),
        ("run", "~/recipe.yaml"),
        ("diff", "~/small", "~/again/plan.json"),
        ("push", "~/small", "owner/name", "--dry-run"),
        ("profile", "~/bolt", "--weights-only", "--output", "~/profile"),
        ("evaluate", "seasonal-naive", *DATA, "--output", "~/naive.json"),
        ("compare", "~/naive.json", "~/naive.json", "--output", "~/compared"),
        ("report", "~/run", "--output", "~/page.html"),
    ):
        outcome = command(*arguments)
        assert outcome.code == 0, (arguments, outcome.err)
    assert list(work.iterdir()) == []
    outcome = command("report", "~/run", "--output", "~/run/report.json", "--force")
    assert_refused(outcome, 2, "run/report.json' is the input")
    assert command("report", "~/run", "--output", "~/page.html", "--force").code == 0
    assert (home / "run" / "bolt-svd" / "config.json").exists()
    assert_refused(
        command("compress", "~/bolt", "--rank", 3, "--series", "~/none.csv", "--output", "~/x"),
        1,
        f"there is no file '{home / 'none.csv'}'",
    )


@pytest.fixture
def precious(bolt: Path, tmp_path: Path) -> Path:
    """A directory with a model, a series, a plan, recipes and results in it."""
    root = tmp_path / "precious"
    shutil.copytree(bolt, root / "model")
    np.savetxt(root / "series.csv", np.random.default_rng(0).normal(size=(60, 2)).cumsum(axis=0))
    model = {"model": str(root / "model"), "output": str(root / "run")}
    (root / "recipe.yaml").write_text(yaml.safe_dump(model))
    (root / "recover.yaml").write_text("steps: 1\n")
    (root / "plan.json").write_text(
        json.dumps({"method": "svd", "family": "chronos-bolt", "projections": []})
    )
    return root


def test_no_input_is_lost(
    command: Command, bolt: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, series = precious / "model", precious / "series.csv"
    (precious / "scores.json").write_text("{}")
    before = snapshot(precious)
    calls = [
        ("compress", model, *SVD, "--output", model),
        ("compress", model, *SVD, "--output", precious),
        ("compress", bolt, "--rank", 3, "--series", series, "--output", precious),
        ("compress", bolt, "--recipe", precious / "recipe.yaml", "--output", precious),
        ("profile", model, "--output", model),
        ("profile", bolt, "--series", series, "--output", series),
        ("evaluate", model, *DATA, "--output", model),
        ("evaluate", model, *DATA, "--output", model / "config.json"),
        ("evaluate", bolt, "--against", model, *DATA, "--output", model),
        ("evaluate", bolt, "--suite", series, "--horizon", 2, "--output", series),
        ("recover", model, "--teacher", bolt, "--output", model),
        ("recover", bolt, "--teacher", model, "--output", precious),
        ("recover", bolt, "--teacher", bolt, "--series", precious, "--output", model),
        ("recover", bolt, "--teacher", bolt, "--config", precious / "recover.yaml", "--output",
         precious),
        ("run", precious / "recipe.yaml", "--output", precious / "recipe.yaml"),
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(
            "tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("a model was loaded")
        )
        for arguments in calls:
            outcome = command(*arguments, "--force")
            if arguments[0] == "run":
                assert_refused(outcome, 1, "recipe.yaml/model-fold' cannot be written: Not a dir")
            else:
                assert_refused(outcome, 2, "which would be lost; choose another output")
            assert snapshot(precious) == before, arguments
    # A recovery is resumed from what lies beside the output, and that is removed when it is done.
    work = precious / "small.recovery"
    model.rename(work)
    before = snapshot(precious)
    outcome = command("recover", work, "--teacher", bolt, "--output", precious / "small", "--force")
    assert_refused(outcome, 2, "small.recovery' is the input")
    assert snapshot(precious) == before


def test_outputs_over_inputs_are_refused(command: Command, precious: Path, forbid: Forbid) -> None:
    for module in ("workflows.run", "workflows.sweep", "training.pretrain_model"):
        forbid(f"tscompress.{module}.load")
    forbid("tscompress.training.pretraining._Run")
    run = {"model": str(precious / "model"), "output": str(precious)}
    shutil.copytree(precious / "model", precious / "recovery")
    (precious / "scores.csv").write_text('"dataset",model,MASE,WQL\n')  # of ours, but an input
    sweep = run | {"grid": [{"method": "svd", "rank": [2, 3]}]}
    pretrain = yaml.safe_load(tiny_yaml(steps=1)) | {"embedding_from": str(precious / "model")}
    for verb, name, content, options, text in (
        ("run", "a.yaml", run | {"model": str(precious / "recovery"), "recover": {"steps": 1}}, (),
         "recovery' is the input"),
        ("run", "a.yaml", run | {"calibration": {"source": str(precious / "scores.csv")}}, (),
         "scores.csv' is the input"),
        ("run", "report.json", run, (), "report.json' is the input"),
        ("sweep", "sweep.yaml", sweep, (), "sweep.yaml' is the input"),
        ("pretrain", "a.yaml", pretrain, ("--output", precious), "model' is the input"),
        ("pretrain", "a.yaml", pretrain, ("--output", precious, "--resume"), "model' is the input"),
    ):  # fmt: skip
        (precious / name).write_text(json.dumps(content))  # JSON is YAML
        before = snapshot(precious)
        assert_refused(command(verb, precious / name, *options, "--force"), 2, text)
        assert snapshot(precious) == before
        (precious / name).unlink()


def test_the_library_replaces_no_model_by_what_was_made_from_it(precious: Path) -> None:
    before = snapshot(precious)
    compressed = tscompress.compress(precious / "model", method="svd", rank=3)
    for output in (precious, precious / "model"):
        with pytest.raises(OutputExistsError, match=r"the input '.*model', which would be lost"):
            save(compressed, output, force=True)
    assert snapshot(precious) == before


def test_compare_keeps_what_it_compares(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "scores"
    for name in ("a.json", "b.json"):
        assert command("evaluate", "seasonal-naive", *DATA, "--output", output / name).code == 0
    before = snapshot(output)
    files = output / "a.json", output / "b.json"
    for force in ((), ("--force",)):
        outcome = command("compare", *files, "--output", output, *force)
        if force:
            assert outcome.code == 0, outcome.err
        else:
            assert_refused(outcome, 2, "exists already; choose another output or pass --force")
    after = snapshot(output)
    assert after.keys() - before.keys() == {"ratios.csv", "series.csv"}
    assert before.items() <= after.items()
    (output / "a.json").rename(output / "ratios.csv")
    outcome = command("compare", output / "ratios.csv", files[1], "--output", output, "--force")
    assert_refused(outcome, 2, "ratios.csv' is the input")
    assert (output / "ratios.csv").read_bytes() == before["a.json"]


# --------------------------------------------------------------------------------------------------
# Compress
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["chronos-t5", "chronos-2"], indirect=True)
def test_compress_evaluate_bench_and_diff(
    command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "small"
    outcome = command("compress", checkpoint, "--output", output, "--rank", 4, *CALIBRATE)
    assert outcome.code == 0, outcome.err
    assert "d_kv 4, d_ff 40" in outcome.out
    assert f"saved and loaded back bit-equal: {output}" in outcome.out
    copied = {GENERATION} & {path.name for path in checkpoint.iterdir()}
    assert {path.name for path in output.iterdir()} == PLAN_FILES | copied
    assert Plan.load(output / "plan.json").uniform_sizes == (4, 40)
    assert json.loads((output / "config.json").read_text())["d_kv"] == 4

    data = ("--dataset", "monash_m3_yearly", "--max-series", 2)
    scores = command("evaluate", output, "--against", checkpoint, *data, "--json",
                     "--output", tmp_path / "scores")  # fmt: skip
    assert scores.code == 0, scores.err
    assert scores.json["against"]["model"] == checkpoint.name
    written = json.loads((tmp_path / "scores" / "scores.json").read_text())
    for one in ("result", "against"):
        for row in written[one]["rows"]:
            assert len(row.pop("series")["quantile_loss"]) == 2  # too much for a terminal
    assert scores.json == written
    assert (tmp_path / "scores" / "scores.csv").exists()

    timing = ("--repeats", 2, "--warmup", 0, "--no-memory", "--context-length", 32,
              "--horizon", 4, "--batch-size", 2)  # fmt: skip
    bench = command("bench", output, "--against", checkpoint, *timing, "--json")
    assert bench.code == 0, bench.err
    assert len(bench.json["models"]) == 2
    table = command("bench", output, *timing)
    assert (table.code, "small" in table.out) == (0, True)
    sampled = command("bench", output, *timing, "--num-samples", 3, "--json")
    if adapter_of(load(checkpoint).family).draws_samples:
        assert sampled.json["workload"]["num_samples"] == 3
    else:
        assert_refused(sampled, 2, "num_samples")

    other = tmp_path / "smaller"
    command("compress", checkpoint, "--output", other, "--rank", 2, *CALIBRATE)
    diff = command("diff", output, other / "plan.json", "--json")
    assert diff.code == 0
    changes = diff.json["changes"]
    assert len(changes) == len(load(checkpoint).architecture.attention)
    assert all(line.endswith("head size 4 -> head size 2") for line in changes)
    assert "every layer the same size" in command("diff", output, output).out


DATA = ("--dataset", "monash_m1_yearly", "--dataset", "monash_m3_yearly", "--max-series", 6)


def test_compare_reads_what_evaluate_wrote(
    command: Command, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    bolt, t5 = checkpoints["chronos-bolt"], checkpoints["chronos-t5"]
    files = [tmp_path / "bolt.json", tmp_path / "t5", tmp_path / "naive.json"]
    for model, output in zip((bolt, t5, "seasonal-naive"), files, strict=True):
        done = command("evaluate", model, *DATA, "--output", output)
        assert done.code == 0, done.err
    (tmp_path / "sub").mkdir()
    files[0] = files[0].rename(tmp_path / "sub" / "bolt.json")

    shown = command("compare", *files, "--output", tmp_path / "out")
    assert shown.code == 0, shown.err
    assert "chronos-t5: WQL" in shown.out
    assert "geometric mean" in shown.out
    ratios = pd.read_csv(tmp_path / "out" / "ratios.csv")
    assert len(ratios) == 2 * 3 * 2  # models, datasets and their mean, metrics
    assert (ratios["low"] <= ratios["ratio"]).all()
    assert len(pd.read_csv(tmp_path / "out" / "series.csv")) == 3 * 2 * 6

    machine = command("compare", *files, "--json", "--seed", 1, "--margin", 0.02)
    assert machine.json["reference"] == "chronos-bolt"
    assert machine.json["margin"] == 0.02
    again = command("compare", *files, "--output", tmp_path / "out")
    assert_refused(again, 2, "exists already")
    assert command("compare", *files, "--output", tmp_path / "out", "--force").code == 0


@pytest.mark.usefixtures("drawn_figures")
def test_evaluate_against_prints_intervals_and_changes(
    command: Command, bolt: Path, tmp_path: Path
) -> None:
    options = (*DATA, "--against", bolt, "--fidelity", "--output", tmp_path / "out")
    done = command("evaluate", "seasonal-naive", *options)
    assert done.code == 0, done.err
    assert "seasonal-naive relative to chronos-bolt" in done.out
    assert "(95%)" in done.out
    assert "series that got worst" in done.out
    content = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert content["fidelity"]["datasets"][0]["dataset"] == "monash_m1_yearly"
    worst = content["fidelity"]["worst"]
    assert (tmp_path / "out" / "worst.png").exists() == bool(worst)
    # The file holds both results, so that it can be compared alone.
    shown = command("compare", tmp_path / "out", "--json")
    assert shown.json == content["comparison"]


def test_several_seeds(command: Command, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t5 = checkpoints["chronos-t5"]
    options = (*DATA, "--num-samples", 4, "--json")
    done = command("evaluate", t5, *options, "--seeds", "0,3", "--output", tmp_path / "t5.json")
    assert done.json["result"]["sampling"] == {"seeds": [0, 3], "num_samples": 4, "batch_size": 32}
    assert "of seed" not in done.err
    layout = ("--gift-eval", "--output", tmp_path / "layout")
    beside = command("evaluate", t5, *options, "--seeds", "0,3", *layout)
    assert "all_results.csv are of seed 0 alone" in beside.err
    single = [command("evaluate", t5, *options, "--seed", seed).json for seed in (0, 3)]
    for index, row in enumerate(done.json["result"]["rows"]):
        mean = np.mean([one["result"]["rows"][index]["WQL"] for one in single])
        assert row["WQL"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--seeds", "0,x"), "--seeds '0,x'"),
        (("--seeds", "0,0"), "seeds are [0, 0]"),
        (("--seeds", "0,1", "--seed", 2), "--seed cannot go with it"),
        (("--fidelity",), "--against"),
        (("--num-samples", 3), "num_samples"),
    ],
)
def test_evaluate_refuses_options(
    command: Command, bolt: Path, options: tuple[object, ...], text: str
) -> None:
    assert_refused(command("evaluate", bolt, *DATA[:2], "--max-series", 2, *options), 2, text)


def test_evaluate_refuses_a_margin_before_a_model_is_loaded(
    command: Command, bolt: Path, forbid: Forbid
) -> None:
    forbid("tscompress.workflows.evaluate_models.evaluate_models")
    done = command("evaluate", bolt, *DATA[:2], "--against", "seasonal-naive", "--margin", 2)
    assert_refused(done, 2, "margin is 2.0")


def test_compare_refuses_what_it_cannot_read(command: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")  # which has no end
    for name, text in (
        ("pipe.json", "(pipe.json: it is not a regular file)"),
        ("none.json", "holds no evaluation result (none.json: No such file or directory); give"),
        ("bad.json", "(bad.json: not JSON: "),
        ("list.json", "it is no JSON object"),
        ("other.json", "not an evaluation result"),
    ):
        assert_refused(command("compare", tmp_path / name, tmp_path / name), 1, text)
    done = command("evaluate", "seasonal-naive", *DATA, "--output", tmp_path / "naive.json")
    assert done.code == 0
    assert_refused(command("compare", tmp_path / "naive.json"), 2, "1 result given")


def test_compare_scores_models(
    command: Command, checkpoints: dict[str, Path], tmp_path: Path, forbid: Forbid
) -> None:
    models = checkpoints["chronos-bolt"], checkpoints["chronos-2"]
    file, out = tmp_path / "first.json", tmp_path / "out"
    assert command("evaluate", models[0], *DATA, "--output", file).code == 0
    shown = command("compare", *models, "seasonal-naive", *DATA, "--output", out, "--json")
    assert shown.code == 0, shown.err
    series = {"datasets": ["monash_m1_yearly", "monash_m3_yearly"], "max_series": 6}
    found = tscompress.compare([*models, "seasonal-naive"], **series)
    assert shown.json == found.to_dict()
    assert set(pd.read_csv(out / "series.csv")["model"]) == {
        "chronos-bolt",
        "chronos-2",
        "seasonal-naive",
    }
    drawing = "seasonal-naive", checkpoints["chronos-t5"]
    sampling = "--batch-size", 4, "--seeds", "0,1", "--num-samples", 3
    sampled = command("compare", *drawing, *DATA, *sampling, "--json")
    same = tscompress.compare(drawing, batch_size=4, seeds=(0, 1), num_samples=3, **series)
    assert sampled.json == same.to_dict()
    mixed = command("compare", file, *models[1:], *DATA, "--json")  # a file, and a model
    assert mixed.json["models"] == shown.json["models"][:1]

    paths = command("compare", *models, *DATA, "--num-samples", 3)
    assert_refused(paths, 2, "forecasts quantiles, not samples")
    nowhere = command("compare", *models, "--suite", "in-domain", "--root", tmp_path / "none")
    assert_refused(nowhere, 1, f"in {tmp_path / 'none'}")
    forbid("tscompress.checkpoints.load.find")
    assert_refused(command("compare", *models, *DATA, "--margin", 2), 2, "margin is 2.0")
    assert_refused(command("compare", models[0], *DATA), 2, "1 result given")
    assert_refused(command("compare", file, models[1], "--dataset", "none"), 2, "none")
    assert_refused(command("compare", *models, "--horizon", 3), 2, "horizon")
    assert_refused(command("compare", *models, *DATA, "--batch-size", "big"), 2, "batch_size")
    assert_refused(command("compare", *models, *DATA, "--seeds", "0;1"), 2, "--seeds")
    assert_refused(command("compare", file, file, "--seeds", "0,1"), 2, "--seeds cannot go with it")
    refused = command("compare", file, file, "--max-series", 6)
    assert_refused(refused, 2, "--max-series cannot go with it")


@any_family
@pytest.mark.parametrize("method", ["svd", "activation-svd"])
def test_factoring_projections(
    command: Command, checkpoint: Path, tmp_path: Path, method: str
) -> None:
    plans = []
    for rank in (3, 2):
        output = tmp_path / str(rank)
        calibrate = CALIBRATE if method == "activation-svd" else ()
        outcome = command("compress", checkpoint, "--output", output, "--rank", rank, "--method",
                          method, *calibrate)  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert {path.name for path in output.iterdir()} == PLAN_FILES
        plans.append(load(output).plan)
        assert set(plans[-1].ranks.values()) == {rank}
    changes = command("diff", tmp_path / "3", tmp_path / "2", "--json").json["changes"]
    assert len(changes) == len(plans[0].projections)
    assert all(line.endswith(": 3 -> 2") for line in changes)


def test_json_is_one_object_and_nothing_else(command: Command, bolt: Path, tmp_path: Path) -> None:
    outcome = command("compress", bolt, "--output", tmp_path / "out", "--rank", 3, "--json",
                      *CALIBRATE)  # fmt: skip
    assert outcome.code == 0
    assert set(outcome.json) == {"output", "plan"}
    assert Plan.parse(outcome.json["plan"]) == Plan.load(tmp_path / "out" / "plan.json")


def test_a_path_in_brackets_is_shown_as_it_is(command: Command, bolt: Path, tmp_path: Path) -> None:
    output = tmp_path / ("long-" * 30 + "[bold]")
    outcome = command("compress", bolt, "--output", output, "--rank", 3, "--method", "svd")
    assert f"saved and loaded back bit-equal: {output}\n" in outcome.out


def test_dry_run_shows_the_plan_and_writes_nothing(
    command: Command, bolt: Path, tmp_path: Path
) -> None:
    arguments = ("compress", bolt, "--output", tmp_path / "out", "--rank", 3, *CALIBRATE)
    outcome = command(*arguments, "--dry-run", "--json")
    assert outcome.code == 0
    assert list(tmp_path.iterdir()) == []
    command(*arguments)
    assert Plan.parse(outcome.json) == Plan.load(tmp_path / "out" / "plan.json")


def test_a_dry_run_refuses_what_the_command_refuses(
    command: Command, bolt: Path, tmp_path: Path
) -> None:
    arguments = ("compress", bolt, "--output", tmp_path / "out", "--width", "1.0", *CALIBRATE)
    for flags in ((), ("--dry-run",)):
        assert_refused(command(*arguments, *flags), 2, "keeps every layer dense")


def test_an_edited_plan_is_obeyed(command: Command, bolt: Path, tmp_path: Path) -> None:
    command("compress", bolt, "--output", tmp_path / "first", "--rank", 3, *CALIBRATE)
    content = json.loads((tmp_path / "first" / "plan.json").read_text())
    content["heads"][0]["qk_size"] = 1
    content["hidden"][1]["kept"] = 30
    (tmp_path / "edited.json").write_text(json.dumps(content))
    outcome = command("compress", bolt, "--output", tmp_path / "second", "--plan",
                      tmp_path / "edited.json", *CALIBRATE)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert load(tmp_path / "second").plan == Plan.parse(content)
    assert not (tmp_path / "second" / "recipe.yaml").exists()
    head, units = content["heads"][0]["name"], content["hidden"][1]["name"]
    diff = command("diff", tmp_path / "first", tmp_path / "second", "--json").json["changes"]
    assert diff == [
        f"{head}: head size 3 -> head sizes 1 (q, k), 3 (v)",
        f"{units}: 40 hidden units -> 30 hidden units",
    ]

    content["heads"][0]["qk_size"] = 10_000
    (tmp_path / "edited.json").write_text(json.dumps(content))
    outcome = command("compress", bolt, "--output", tmp_path / "third", "--plan",
                      tmp_path / "edited.json")  # fmt: skip
    assert_refused(outcome, 2, "10000 and 3")


def test_an_edited_plan_of_factors_is_obeyed(command: Command, bolt: Path, tmp_path: Path) -> None:
    svd = ("--method", "svd")
    command("compress", bolt, "--output", tmp_path / "first", "--rank", 3, *svd)
    content = json.loads((tmp_path / "first" / "plan.json").read_text())
    content["projections"][0]["rank"] = 1
    content["projections"][1]["rank"] = None
    (tmp_path / "edited.json").write_text(json.dumps(content))
    outcome = command("compress", bolt, "--output", tmp_path / "second", "--plan",
                      tmp_path / "edited.json")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert load(tmp_path / "second").plan == Plan.parse(content)
    first, second = (content["projections"][index]["name"] for index in (0, 1))
    diff = command("diff", tmp_path / "first", tmp_path / "second", "--json").json["changes"]
    assert diff == [f"{first}: 3 -> 1", f"{second}: 3 -> dense"]

    content["projections"][0]["rank"] = 10_000
    (tmp_path / "edited.json").write_text(json.dumps(content))
    outcome = command("compress", bolt, "--output", tmp_path / "third", "--plan",
                      tmp_path / "edited.json")  # fmt: skip
    assert_refused(outcome, 2, "rank 10000 of")


def sizes_of(directory: Path) -> tuple[set[int], set[int], set[int]]:
    """Of queries and keys, of values, and of hidden layers."""
    plan = Plan.load(directory / "plan.json")
    return (
        {head.qk_size for head in plan.heads},
        {head.vo_size for head in plan.heads},
        {hidden.kept for hidden in plan.hidden},
    )


@any_family
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["--method", "fold", "--rank", 4, "--ff-ratio", 0.5], ({4}, {4}, {20})),
        (["--rank", 4], ({4}, {4}, {40})),
        (["--ff-ratio", 0.25], ({8}, {8}, {10})),
        (["--rank", 4, "--ff-ratio", 0.5, "--exclude", "encoder.block.0.*"],
         ({4, 8}, {4, 8}, {20, 40})),
        (["--schedule", "2,0", "--ff-ratio", 0.5], ({2}, {2}, {20})),
        (["--schedule", "5,0", "--powers-of-two"], ({4}, {4}, {40})),
    ],
    ids=str,
)  # fmt: skip
def test_fold_takes_the_sizes_asked_for(
    command: Command, checkpoint: Path, tmp_path: Path, options: list[object], sizes: Any
) -> None:
    output = tmp_path / "out"
    outcome = command("compress", checkpoint, "--output", output, *options, *CALIBRATE)
    assert outcome.code == 0, outcome.err
    assert sizes_of(output) == sizes
    plain = all(len(found) == 1 for found in sizes)
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == ("t5" if plain else "tscompress")
    if "--rank" not in options or "--ff-ratio" not in options:
        return
    # What is written down does the same again.
    again = tmp_path / "again"
    outcome = command("compress", checkpoint, "--output", again, "--recipe", output / "recipe.yaml")
    assert outcome.code == 0, outcome.err
    assert (again / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("chronos-bolt", ["--fit", 0.5]),
        ("chronos-bolt", ["--schedule", "2,0.3"]),
        ("chronos-2", ["--schedule", "2,0.3"]),
        ("chronos-bolt", ["--epsilon", 0.3]),
        ("chronos-bolt", ["--energy", 0.8]),
    ],
    indirect=["checkpoint"],
    ids=str,
)
def test_fold_by_schedule(
    command: Command, checkpoint: Path, tmp_path: Path, options: list[object]
) -> None:
    output = tmp_path / "out"
    outcome = command("compress", checkpoint, "--output", output, *options, *CALIBRATE)
    assert outcome.code == 0, outcome.err
    plan = Plan.load(output / "plan.json")
    assert plan.changes_anything
    if options[0] == "--schedule":
        depths = {block.name: block.depth for block in load(checkpoint).architecture.attention}
        for head in plan.heads:
            wanted = (2, 3, 3, 4)[depths[head.name]]  # ceil(2 (1 + i)^0.3)
            assert head.vo_size == wanted
            assert head.qk_size == (4 if wanted == 3 and head.kind == "time" else wanted)


@two_stacks
def test_fold_to_fewer_layers(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "out"
    options = "--rank", 4, "--layers", 1, *CALIBRATE
    outcome = command("compress", checkpoint, "--output", output, *options, "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    assert not output.exists()
    told = json.loads(outcome.out)["kept_layers"]
    assert [len(layers) for layers in told.values()] == [1] * len(told)
    outcome = command("compress", checkpoint, "--output", output, *options)
    assert outcome.code == 0, outcome.err
    assert "layers kept: encoder" in outcome.out
    plan = Plan.load(output / "plan.json")
    assert {stack: list(layers) for stack, layers in (plan.kept_layers or {}).items()} == told
    assert load_recipe(output / "recipe.yaml").layers == (1,)
    model: Any = load(output).model
    assert model.config.num_layers == len(model.encoder.block) == 1


@pytest.mark.parametrize("layout", ["folded", "factored"])
def test_fold_within_a_budget(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "out"
    outcome = command("compress", bolt, "--output", output, "--budget", "parameters=0.5",
                      "--layout", layout, "--calibration-series", 16, "--keep-width")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert load(output).model.config.d_model == load(bolt).model.config.d_model  # type: ignore[union-attr]
    small, large = (parameter_count(load(path).model) for path in (output, bolt))
    assert 0.3 * large < small <= 0.5 * large
    plan = Plan.load(output / "plan.json")
    assert plan.schedule["budget"] == "parameters=0.5"
    assert (plan.uniform_sizes is None) == (layout == "factored")
    kept = yaml.safe_load((output / "recipe.yaml").read_text())
    assert kept["schedule"]["kind"] == "planned"
    assert kept["schedule"]["keep_width"] is plan.schedule["keep_width"] is True
    assert list((tmp_path / "cache").rglob("*.json"))


def test_a_recipe_says_everything_but_model_and_output(
    command: Command, bolt: Path, tmp_path: Path
) -> None:
    recipe = {
        "model": "another/model",
        "output": "elsewhere",
        "method": "svd",
        "schedule": {"kind": "rank", "rank": 2},
        "exclude": ["*decoder*"],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    outcome = command("compress", bolt, "--output", tmp_path / "out", "--recipe",
                      tmp_path / "recipe.yaml")  # fmt: skip
    assert outcome.code == 0, outcome.err
    plan = load(tmp_path / "out").plan
    assert plan is not None
    assert plan.method == "svd"
    assert set(plan.ranks.values()) == {2}
    assert not any("decoder" in name for name in plan.ranks)
    # What is kept next to the weights says what was done, not what was asked elsewhere.
    kept = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert (kept["model"], kept["output"]) == (str(bolt), str(tmp_path / "out"))


def test_an_existing_output_is_left_alone(command: Command, bolt: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    (tmp_path / "recipe.yaml").write_text(tiny_yaml(steps=1))
    before = snapshot(tmp_path)
    for arguments in (
        ("compress", bolt, "--rank", 3),
        ("evaluate", bolt),
        ("pretrain", tmp_path / "recipe.yaml"),
        ("profile", bolt),
    ):
        outcome = command(*arguments, "--output", tmp_path / "out")
        assert_refused(outcome, 2, "exists already; choose another output or pass --force")
        forced = command(*arguments, "--output", tmp_path / "out", "--force")
        assert_refused(forced, 2, "tscompress ")
        assert snapshot(tmp_path) == before
    (tmp_path / "out" / "mine.txt").unlink()
    for force in ((), ("--force",)):  # the second one replaces a checkpoint of ours
        outcome = command("compress", bolt, "--rank", 3, "--output", tmp_path / "out", *force,
                          "--method", "svd")  # fmt: skip
        assert outcome.code == 0
        assert {path.name for path in (tmp_path / "out").iterdir()} == PLAN_FILES


@pytest.mark.parametrize("name", ["compress", "compare", "run", "sweep"])
def test_what_one_process_writes_is_refused_to_several(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    grid = {"grid": [{"rank": [4]}]} if name == "sweep" else {"ff_ratio": 0.5}
    recipe.write_text(yaml.safe_dump({"model": "x", "output": str(tmp_path / "out"), **grid}))
    arguments = {
        "compress": ["x", "--rank", 4, "--output", tmp_path / "out"],
        "compare": ["seasonal-naive", "x", "--output", tmp_path / "out"],
    }
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = command(name, *arguments.get(name, [recipe]))
    assert_refused(outcome, 2, f"{name} runs in one process; start it without torchrun")
    assert not (tmp_path / "out").exists()


FOR_FOLD = "has no measure; for fold give parameters="


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["evaluate", "seasonal-naive", "--seed", -1], "seed: "),
        (["evaluate", "reference/bolt", "--batch-size", 2_000_000], "batch_size"),
        (["evaluate", "seasonal-naive", "--batch-size", 8], "--batch-size cannot go with it"),
        (["evaluate", "seasonal-naive", "--cross-learning"], "--cross-learning cannot go with it"),
        (["evaluate", "seasonal-naive", "--max-series", 2_000_000_000], "max_series: "),
        (["evaluate", "seasonal-naive", "--margin", 0.1], "--margin cannot go with it"),
        (["evaluate", "seasonal-naive", "--dtype", "bfloat16"], "--dtype cannot go with it"),
        (
            ["evaluate", "seasonal-naive", "--against", "reference/bolt", "--revision", "main"],
            "seasonal-naive is no checkpoint; --revision cannot go with it",
        ),
        (["bench", "reference/bolt", "--share-cross-attention"], "only Chronos-T5 does"),
        (["probe", "reference/bolt", "--num-series", 2_000_000], "num_series: "),
        (["probe", "reference/bolt", "--batch-size", 2_000_000], "batch_size"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_numbers_out_of_range_are_one_line(
    command: Command, arguments: list[object], text: str
) -> None:
    assert_refused(command(*arguments), 2, text)


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--max-series", 5], "the recipe has no evaluation"), (["--device", "gpu"], "not a device")],
)
def test_run_refuses_what_it_would_ignore_and_unknown_devices(
    command: Command, bolt: Path, tmp_path: Path, options: list[object], text: str
) -> None:
    pytest.importorskip("onnxruntime")
    recipe = {"model": str(bolt), "output": str(tmp_path / "out"), "ff_ratio": 0.5,
              "evaluation": None, "export": {}}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert_refused(command("run", tmp_path / "recipe.yaml", *options), 2, text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "none was given"),
        (["--rank", 3, "--budget", 0.5], "rank and budget were given"),
        (["--rank", 3, "--fit", 0.5], "rank and fit were given"),
        (["--rank", 0], "rank: "),
        (["--rank", -1], "rank: "),
        (["--rank", 9], "size 8; 9 and 9"),
        (["--rank", 8], "there is nothing to save"),
        (["--budget", 0], f"budget 0 {FOR_FOLD}0,"),
        (
            ["--budget", 0.5],
            f"budget 0.5 {FOR_FOLD}0.5, bytes=20MB, macs=0.5, kv-cache=0.5, latency=0.5 or wql=1%",
        ),
        (["--budget", "nan"], "budget nan"),
        (["--budget", "half"], "'half' is no budget; allowed are"),
        (["--budget", "parameters=0"], "'parameters=0' is no budget"),
        (["--budget", "wql=2"], "'wql=2' is no budget"),
        (["--method", "svd", "--budget", 0], "budget: "),
        (["--method", "svd", "--budget", 1.5], "budget: "),
        (["--method", "svd", "--budget", "nan"], "budget: "),
        (["--method", "svd", "--budget", "parameters=0.5"], "is for fold"),
        (["--method", "svd", "--rank", 3, "--ff-ratio", 0.5], "ff_ratio is for fold"),
        (["--method", "svd", "--fit", 0.1], "svd needs a schedule"),
        (["--method", "svd"], "none was given"),
        (["--method", "svd", "--ff-ratio", 0.5], "none was given"),
        (["--ff-ratio", 0], "ff_ratio: "),
        (["--ff-ratio", 1.5], "ff_ratio: "),
        (["--fit", 0], "fit: "),
        (["--rank", 3, "--feed-forward"], "ff_ratio"),
        (["--rank", 3, "--layout", "factored"], "layout"),
        (["--rank", 3, "--multiple", 8], "multiple"),
        (["--rank", 3, "--depth"], "depth"),
        (["--ff-ratio", 0.5, "--layout", "factored"], "layout"),
        (["--ff-ratio", 0.5, "--multiple", 8], "multiple"),
        (["--ff-ratio", 0.5, "--depth"], "depth"),
        (["--ff-ratio", 0.5, "--keep-width"], "keep_width"),
        (["--budget", "parameters=0.5", "--width", 8, "--keep-width"], "keep_width"),
        (["--budget", "parameters=0.5", "--width", 24], "width 24 is not smaller than d_model"),
        (["--method", "svd", "--rank", 3, "--width", 8], "width is for fold"),
        (["--width", 24], "width 24 is not smaller than d_model"),
        (["--ff-ratio", 0.5, "--powers-of-two"], "powers_of_two"),
        (["--layers", "a,b"], "--layers 'a,b'"),
        (["--layers", "1,1,1"], "layers: "),
        (["--layers", 0], "layers.0: "),
        (["--layers", 2], "layers 2 of 2,2 of "),
        (["--budget", "parameters=0.5", "--layers", 1], "a budget chooses the layers by depth"),
        (["--method", "svd", "--rank", 3, "--layers", 1], "layers is for fold"),
        (["--rank", 4, "--layers", 1, "--exclude", "*.0.*"], "exclude"),
        (["--rank", 9, "--layers", 1], "size 8; 9 and 9"),
        (["--budget", "parameters=0.5", "--layout", "loose"], "layout: "),
        (["--budget", "parameters=0.5", "--multiple", 3], "multiple: "),
        (
            ["--budget", "parameters=0.5", "--layout", "factored", "--depth"],
            "depth",
        ),
        (["--budget", "parameters=0.5", "--ff-ratio", 0.5], "give no ff_ratio with it"),
        (["--budget", "parameters=0.5", "--exclude", "*"], "give no exclude with it"),
        (["--budget", "parameters=0.5", "--powers-of-two"], "powers_of_two rounds a power law"),
        (["--epsilon", -0.1], "epsilon: "),
        (["--energy", 2], "energy: "),
        (["--schedule", "5"], "schedule '5'"),
        (["--schedule", "a,b"], "is not D0,ALPHA"),
        (["--schedule", "1,2,3"], "is not D0,ALPHA"),
        (["--rank", 3, "--powers-of-two"], "powers_of_two rounds a power law"),
        (["--rank", 3, "--method", "magic"], "method"),
        (
            ["--rank", 10_000, "--method", "svd"],
            "nothing to save",
        ),
        (["--rank", 3, "--plan", "plan.json"], "there is no plan at 'plan.json'"),
        (["--rank", 3, "--series", "none.csv"], "there is no file 'none.csv'"),
        (["--recipe", "none.yaml"], "there is no recipe at 'none.yaml'"),
        (["--rank", 3, "--device", "tpu9"], "'tpu9' is not a device"),
        (["--rank", 3, "--revision", "main"], "a revision goes with a Hub id only"),
    ],
)
def test_failures_are_one_line(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: list[object], text: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outcome = command("compress", bolt, "--output", "out", *options)
    assert_refused(outcome, 1 if "no file" in text else 2, text)
    assert list(tmp_path.iterdir()) == []


def test_a_revision_is_of_the_model_and_not_of_what_it_is_held_against(
    command: Command, bolt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both are of one repository."""
    asked: list[str | None] = []

    def fake(model: str, *, revision: str | None, **options: Any) -> Any:
        asked.append(revision)
        return load(bolt, **options)

    monkeypatch.setattr(given, "load", fake)
    sizes = "--dataset", "monash_m1_yearly", "--max-series", "2", "--no-cache"
    outcome = command("evaluate", "me/small", "--revision", "v2", "--against", "me/small", *sizes)
    assert outcome.code == 0, outcome.err
    assert sorted(asked, key=str) == [None, "v2"]


def test_devices_that_are_not_there(command: Command, bolt: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are some")
    for device in ("cuda", "cuda:1"):
        assert_refused(command("bench", bolt, "--device", device), 2, "CUDA")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "00:00:00"), (59.6, "00:01:00"), (3661, "01:01:01"), (108_000, "30:00:00")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_recovery_goes_on_though_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    line = RecoveryProgress(10, 20, 1.0, 1.0, held_out=0.5)
    told: list[str] = []

    def gone(text: str, **_: Any) -> None:
        told.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(typer, "echo", gone)
    with training_progress(shown=True) as report:
        report(line)
    assert told == ["step 10/20  held out 0.5000  left 00:00:01"]


@pytest.mark.parametrize(
    "option",
    [
        ("--rank", 3),
        ("--method", "svd"),
        ("--exclude", "*decoder*"),
        ("--feed-forward",),
        ("--powers-of-two",),
        ("--ff-ratio", 0.5),
        ("--fit", 0.1),
        ("--budget", "parameters=0.5"),
        ("--layout", "factored"),
        ("--multiple", 8),
        ("--depth",),
        ("--layers", 1),
        ("--latent", 8),
        ("--calibration-series", 5),
        ("--plan", "plan.json"),
    ],
)
def test_no_option_is_taken_and_ignored(
    command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    option: tuple[object, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text('{"method": "svd", "family": "chronos-bolt", "projections": []}')
    Path("recipe.yaml").write_text(
        "model: x\noutput: y\nmethod: svd\nschedule: {kind: rank, rank: 2}\n"
    )
    outcome = command("compress", bolt, "--output", "out", "--recipe", "recipe.yaml", *option)
    assert_refused(outcome, 2, f"--recipe has all options; {option[0]} cannot go with it")
    if option[0] in ("--plan", "--calibration-series"):
        return
    outcome = command("compress", bolt, "--output", "out", "--plan", "plan.json", *option)
    assert_refused(outcome, 2, f"--plan has every size; {option[0]} cannot go with it")
    assert not Path("out").exists()


def test_models_that_cannot_be_read(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, text in (
        (("profile", tmp_path / "none"), "there is no directory"),
        (("compress", tmp_path / "empty", "--output", tmp_path / "out", "--rank", 3),
         "has no config.json"),
        (("evaluate", tmp_path / "empty"), "has no config.json"),
        (("bench", "reference/none"), "there is no 'reference/none'; shipped:"),
    ):  # fmt: skip
        assert_refused(command(*arguments), 1, text)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_evaluation_series_are_refused(command: Command, bolt: Path, tmp_path: Path) -> None:
    from tscompress.data.suites import load_suite

    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"], max_series=2)
    records = [json.dumps({"target": np.asarray(values).tolist()}) for values in dataset.series]
    (tmp_path / "series.jsonl").write_text("\n".join(records))
    outcome = command("compress", bolt, "--output", tmp_path / "out", "--rank", 3, "--series",
                      tmp_path / "series.jsonl")  # fmt: skip
    assert_refused(outcome, 1, "2 of 2 series belong to the evaluation suite")


def test_series_without_values_are_refused_before_the_model(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("id,y\na,1\na,2\nb,3\n")
    outcome = command("compress", tmp_path / "nowhere", "--rank", 4, "--output", tmp_path / "out",
                      "--series", tmp_path / "x.csv")  # fmt: skip
    assert_refused(outcome, 1, "2 series to calibrate on, none with three observed values")


def test_own_series_calibrate(command: Command, bolt: Path, tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(60, 4)).cumsum(axis=0)
    np.savetxt(tmp_path / "series.csv", table, delimiter=",", header="a,b,c,d", comments="")
    command("compress", bolt, "--output", tmp_path / "own", "--rank", 3, "--series",
            tmp_path / "series.csv", "--target-column", "*")  # fmt: skip
    record = json.loads((tmp_path / "own" / "provenance.json").read_text())["calibration"]
    assert (record["source"], record["series"]) == (str(tmp_path / "series.csv"), 4)
    assert record["read"]["layout"] == "wide"
    kept = yaml.safe_load((tmp_path / "own" / "recipe.yaml").read_text())
    assert kept["calibration"]["source"] == str(tmp_path / "series.csv")
    assert_refused(
        command("compress", bolt, "--output", tmp_path / "svd", "--rank", 3, "--method", "svd",
                "--series", tmp_path / "series.csv"),
        2,
        "svd does not calibrate; --series cannot go with it",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Profile, pretrain
# --------------------------------------------------------------------------------------------------


def test_profile(command: Command, bolt: Path, tmp_path: Path) -> None:
    outcome = command("profile", bolt, "--weights-only", "-e", 0.1, "-e", 0.01, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["epsilons"] == [0.1, 0.01]
    shown = command("profile", bolt, "--weights-only", "--output", tmp_path / "profile")
    assert shown.code == 0, shown.err
    assert (tmp_path / "profile" / "profile.json").exists()
    assert_refused(command("profile", bolt, "--weights-only", "-e", 0), 2, "epsilon")


def test_profiles_are_compared(command: Command, bolt: Path, tmp_path: Path) -> None:
    for name, epsilon in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        output = ("--output", tmp_path / name)
        assert command("profile", bolt, "--weights-only", "-e", epsilon, *output).code == 0
    compare = ("compare-profiles", tmp_path / "a", tmp_path / "b" / "profile.json")
    outcome = command(*compare, "--names", "one, two", "--output", tmp_path / "compared")
    assert outcome.code == 0, outcome.err
    assert "one" in outcome.out
    assert (tmp_path / "compared" / "compared_ranks.csv").exists()
    assert command(*compare, "--json").json["epsilons"] == [0.1]
    assert_refused(command(*compare, "--output", tmp_path / "compared"), 2, "--force")
    assert_refused(command(*compare, tmp_path / "c"), 2, "0.2")
    assert_refused(command(*compare, tmp_path / "none"), 1, "none")


def test_sensitivities_are_shown_and_kept(command: Command, bolt: Path, tmp_path: Path) -> None:
    options = ("sensitivity", bolt, "--calibration-series", 8)
    outcome = command(*options, "--depth", "--output", tmp_path / "costs.json")
    assert outcome.code == 0, outcome.err
    for title in ("queries and keys", "values", "hidden units", "whole layers"):
        assert title in outcome.out
    found = Sensitivity.load(tmp_path / "costs.json")
    assert {part.kind for part in found.parts} == {"qk", "vo", "hidden", "layer", "width"}
    # Without layers it is what a budget plans with, and a second look is instant.
    again = command(*options, "--json")
    assert {part["kind"] for part in again.json["parts"]} == {"qk", "vo", "hidden", "width"}
    assert_refused(command(*options, "--output", tmp_path / "costs.json"), 2, "exists already")
    few = command("sensitivity", bolt, "--calibration-series", 2)
    assert_refused(few, 1, "at least four calibration series")


def tiny_yaml(steps: int) -> str:
    bucket = Bucket(context_length=32, horizon=8, batch_size=2)
    recipe = tiny_recipe("chronos-bolt", stages=(Stage(steps=steps, buckets=(bucket,)),))
    return yaml.safe_dump(recipe.model_dump(mode="json"))


def test_pretrain(command: Command, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_yaml(steps=2))
    outcome = command("pretrain", tmp_path / "recipe.yaml", "--output", tmp_path / "a", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json == {"model": str(tmp_path / "a" / "model")}
    assert load(tmp_path / "a" / "model").family == "chronos-bolt"
    shown = command("pretrain", tmp_path / "recipe.yaml", "--output", tmp_path / "b")
    assert "step 2/2  loss" in shown.out
    assert f"saved {tmp_path / 'b' / 'model'}" in shown.out
    (tmp_path / "recipe.yaml").write_text("family: gpt\n")
    outcome = command("pretrain", tmp_path / "recipe.yaml", "--output", tmp_path / "c")
    assert_refused(outcome, 2, "family: ")


def test_run_takes_another_model(command: Command, bolt: Path, tmp_path: Path) -> None:
    recipe = {
        "output": str(tmp_path / "out"),
        "method": "svd",
        "schedule": {"kind": "rank", "rank": 2},
        "profile": None,
        "evaluation": None,
        "bench": None,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert_refused(command("run", tmp_path / "recipe.yaml"), 2, "model: missing")
    outcome = command("run", tmp_path / "recipe.yaml", "--model", bolt)
    assert outcome.code == 0, outcome.err
    written = load_recipe(tmp_path / "out" / bolt.name / f"{bolt.name}-svd" / "recipe.yaml")
    assert written.model == str(bolt)


def test_run_notes_calibration_without_seasons(
    command: Command, bolt: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    rows = [{"item_id": i, "target": v} for i in range(4) for v in rng.standard_normal(60)]
    pd.DataFrame(rows).to_csv(tmp_path / "noise.csv", index=False)
    recipe = {
        "model": str(bolt),
        "output": str(tmp_path / "out"),
        "schedule": {"kind": "rank", "rank": 2},
        "calibration": {"source": str(tmp_path / "noise.csv")},
        "profile": None,
        "evaluation": None,
        "bench": None,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    outcome = command("run", tmp_path / "recipe.yaml")
    assert outcome.code == 0, outcome.err
    assert "none of the 4" in outcome.err


@pytest.mark.parametrize("kept", [False, True])
def test_ctrl_c_during_the_recovery_of_a_run_says_how_it_goes_on(
    kept: bool, command: Command, bolt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "out" / "recovery"

    def stopped(*_: Any, **__: Any) -> None:
        if kept:
            (work / "checkpoint").mkdir(parents=True)
            (work / "checkpoint" / "state.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("tscompress.workflows.run.finishing_run", stopped)
    recipe = {
        "model": str(bolt),
        "output": str(work.parent),
        "schedule": {"kind": "rank", "rank": 4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    outcome = command("run", tmp_path / "recipe.yaml")
    assert outcome.code == 130
    said = f"stopped; the recovery is kept in {work}. Run the same again"
    assert outcome.err.splitlines()[-1] == (
        said if kept else "stopped; nothing half-written was kept."
    )


def test_ctrl_c_during_pretraining_leaves_what_resume_needs(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_yaml(steps=100_000))
    arguments = ["pretrain", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "out")]
    program = Program(tuple(arguments), tmp_path / "said")
    with program.started() as process:
        program.interrupt(process, after="step 20/100000")
        code, out, err = program.finish(process)
    assert code == 130
    assert b"stopped; nothing" not in err  # a checkpoint was kept
    assert b"Traceback" not in err
    assert b"with --resume" in out
    with safe_open(tmp_path / "out" / "checkpoint" / "state.safetensors", "pt") as reader:
        done = int(reader.metadata()["step"])
    assert done >= 20
    # The same run, cut short, goes on where it stopped.
    (tmp_path / "recipe.yaml").write_text(tiny_yaml(steps=done + 3))
    outcome = command(*arguments, "--resume")
    assert outcome.code == 0, outcome.err
    assert f"step {done + 3}/{done + 3}" in outcome.out


def test_time_left_follows_the_pace() -> None:
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.after(3, 10) is None  # done before
    now[0] = 20.0
    assert left.after(5, 10) == pytest.approx(50)
    assert left.after(10, 10) == 0
    assert left.after(1, 4) is None  # other steps
    now[0] = 30.0
    assert left.after(2, 4) == pytest.approx(20)
    assert left.after(0, 4) is None  # the same steps once more
    now[0] = 31.0
    assert left.after(1, 4) == pytest.approx(3)


def test_long_work_tells_the_time_left_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars() as advance:
        for done in range(3):
            advance("sensitivity", done, 4)
    assert capsys.readouterr().err == ""  # it was quick
    with progress_bars(quiet_seconds=0) as advance:
        for done in range(5):
            advance("sensitivity", done, 4)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"sensitivity: {n} of 4" for n in (1, 2, 3)]
    assert all(line.endswith("left") for line in lines)


def test_stages_that_are_done_leave_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars() as advance:
        advance("evaluate a[b]", 0, 2)
        advance("a[b] on first", 3, 3)
        advance("a[b] on second", 3, 3)
        advance("a[b] on second", 1, 3)
    last_frame = capsys.readouterr().err.split("evaluate a")[-1]
    assert last_frame.startswith("[b]")
    assert "on second" in last_frame
    assert "on first" not in last_frame


def test_scores_are_not_cached_without_a_home(
    command: Command, bolt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TSCOMPRESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    outcome = command("evaluate", bolt, *DATA)
    assert outcome.code == 0, outcome.err
    assert "note: scores are not cached: there is no home directory" in outcome.err


def test_numbers_that_json_cannot_say_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    show(True, {"errors": [1.5, float("inf")], "by": {"task": (float("nan"), 2)}})
    assert json.loads(capsys.readouterr().out) == {"errors": [1.5, None], "by": {"task": [None, 2]}}
