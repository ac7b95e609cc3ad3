"""Compressed by design: pretraining with a head size of its own for each layer."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chronos import BaseChronosPipeline
from safetensors.torch import load_file
from shared_fixtures import ROOT, tiny_recipe
from torch import nn

from tscompress.checkpoints import load as loading
from tscompress.cli.app import main
from tscompress.errors import RecipeError, TscompressError, VerificationError
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PowerLawSchedule
from tscompress.training.pretrain_model import build_model, design
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import PretrainRecipe, Stage
from tscompress.training.pretraining import Progress, pretrain
from tscompress.training.windows import Bucket
from tscompress.workflows.recipe import load_pretrain_recipe

TRAINED = ["chronos-bolt", "chronos-t5"]
RECIPES = ROOT / "recipes" / "pretrain"
GROWING = {"d_0": 2, "alpha": 0.7}
#: Of two encoder and two decoder layers: encoder 0, 1; decoder 0, 1; cross-attention 2, 3.
DEPTHS = {
    "encoder.block.0.layer.0.SelfAttention": 0,
    "encoder.block.1.layer.0.SelfAttention": 1,
    "decoder.block.0.layer.0.SelfAttention": 0,
    "decoder.block.0.layer.1.EncDecAttention": 2,
    "decoder.block.1.layer.0.SelfAttention": 1,
    "decoder.block.1.layer.1.EncDecAttention": 3,
}


def short(family: str, steps: int = 2, **changes: object) -> PretrainRecipe:
    bucket = Bucket(context_length=32, horizon=16, batch_size=4)
    stages = (Stage(steps=steps, buckets=(bucket,)),)
    return tiny_recipe(family, **{"stages": stages, "schedule": GROWING} | changes)


def shaped(family: str, **changes: object) -> PretrainRecipe:
    """A recipe with another architecture and no schedule."""
    plain = short(family, schedule=None)
    return short(
        family,
        schedule=None,
        architecture=plain.architecture.model_dump() | changes,
    )


def trained(recipe: PretrainRecipe, output: Path, **options: Any) -> Path:
    model = pretrain(recipe, output, **options)
    assert model is not None
    return model


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def embedding(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.startswith(("shared.", "input_patch_embedding."))
    }


def forecast(model: Path | BaseChronosPipeline) -> torch.Tensor:
    pipeline = loading.load(model).forecaster if isinstance(model, Path) else model
    torch.manual_seed(0)
    quantiles, _ = pipeline.predict_quantiles([torch.arange(30.0)], prediction_length=4)
    return quantiles[0]


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_head_sizes_grow_with_depth(family: str, powers_of_two: bool) -> None:
    recipe = short(family, schedule=GROWING | {"powers_of_two": powers_of_two})
    model = build_model(recipe)
    found = {}
    for name in DEPTHS:
        block = model.get_submodule(name)
        rows = {len(getattr(block, role).weight) for role in "qkv"}
        assert rows == {block.o.weight.shape[1]}
        found[name] = rows.pop() // 4
    ceilings = {name: math.ceil(2 * (1 + i) ** 0.7) for name, i in DEPTHS.items()}
    assert sorted(set(ceilings.values())) == [2, 4, 5, 6]
    rounded = {2: 2, 4: 4, 5: 4, 6: 4}
    assert found == {n: rounded[s] if powers_of_two else s for n, s in ceilings.items()}
    _, plan = design(recipe)
    assert plan is not None
    stored = {head.name: head.parameters for head in plan.heads}
    assert stored == {name: 4 * 24 * 4 * size for name, size in found.items()}


def test_no_head_is_larger_than_d_kv() -> None:
    _, plan = design(short("chronos-bolt", schedule={"d_0": 5, "alpha": 0.7}))
    assert plan is not None
    assert {head.qk_size for head in plan.heads} == {5, 8}


@pytest.mark.parametrize("family", TRAINED)
def test_heads_start_as_those_of_a_dense_model_of_their_size(family: str) -> None:
    """The standard deviation is that of the dense initialisation with this d_kv."""
    wide = {"d_model": 128, "num_heads": 16, "d_kv": 64}
    shape = short(family).architecture.model_dump() | wide
    torch.manual_seed(0)
    scheduled = build_model(short(family, architecture=shape, schedule={"d_0": 8, "alpha": 0.5}))
    for name, depth in DEPTHS.items():
        size = math.ceil(8 * (1 + depth) ** 0.5)
        dense = build_model(shaped(family, **wide | {"d_kv": size}))
        for role in "qkvo":
            ours, theirs = (
                m.get_parameter(f"{name}.{role}.weight").detach() for m in (scheduled, dense)
            )
            assert ours.shape == theirs.shape
            assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.05)
            assert float(ours.mean()) == pytest.approx(0, abs=0.05 * float(ours.std()))
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    assert scheduled.get_submodule(bias).weight.shape == dense.get_submodule(bias).weight.shape


@pytest.mark.parametrize("family", TRAINED)
def test_a_schedule_leaves_everything_else_as_it_was(family: str) -> None:
    """What is not an attention projection is drawn from the seed as without one."""
    models = []
    for schedule in (None, GROWING):
        torch.manual_seed(0)
        models.append(dict(build_model(short(family, schedule=schedule)).named_parameters()))
    dense, scheduled = models
    assert dense.keys() == scheduled.keys()
    for name, parameter in dense.items():
        projection = re.search(r"Attention\.[qkvo]\.weight$", name)
        assert projection or torch.equal(parameter, scheduled[name]), name


# --------------------------------------------------------------------------------------------------
# The checkpoint
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a model that was trained with a schedule."""
    root = tmp_path_factory.mktemp("scheduled")
    return {family: trained(short(family), root / family) for family in TRAINED}


@pytest.mark.parametrize("family", TRAINED)
def test_trained_and_written_as_a_factored_checkpoint(
    family: str, scheduled: dict[str, Path]
) -> None:
    recipe, model = short(family), scheduled[family]
    *_, last = (model.parent / "log.jsonl").read_text().splitlines()
    assert math.isfinite(json.loads(last)["loss"])
    loaded = loading.load(model)
    assert loaded.family == family
    assert loaded.plan == Plan.load(model / "plan.json") == design(recipe)[1]
    assert loaded.plan is not None
    expected = {"kind": "power-law", "powers_of_two": False} | GROWING
    assert loaded.plan.schedule == expected
    assert loaded.stored_dtype == torch.bfloat16
    assert loaded.config["torch_dtype"] == loaded.config["dtype"] == "bfloat16"
    start = build_model(recipe)
    name = "decoder.block.1.layer.1.EncDecAttention.v.weight"
    assert loaded.model.get_parameter(name).shape == start.get_parameter(name).shape == (24, 24)
    assert torch.isfinite(forecast(model)).all()


def test_all_heads_learn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrain(short("chronos-bolt", steps=1, seed=0), tmp_path / "one")
    pretrain(short("chronos-bolt", steps=3, seed=0), tmp_path / "three")
    states = [
        load_file(tmp_path / name / "checkpoint" / "state.safetensors") for name in ("one", "three")
    ]
    for name in DEPTHS:
        for role in "qkvo":
            if name.startswith("decoder") and "SelfAttention" in name and role in "qk":
                continue  # a single position: its scores have no effect in Bolt
            key = f"model.{name}.{role}.weight"
            assert not torch.equal(states[0][key], states[1][key]), key


def test_stock_chronos_opens_schedules_after_one_import(scheduled: dict[str, Path]) -> None:
    models = [scheduled[family] for family in TRAINED]
    lines = [
        "import json, sys, torch",
        "from chronos import BaseChronosPipeline",
        "for model in sys.argv[1:]:",
        "    try:",
        "        BaseChronosPipeline.from_pretrained(model)",
        "    except ValueError as error:",
        "        assert 'tscompress' in str(error), error",
        "    else:",
        "        raise SystemExit('opened without the import')",
        "import tscompress.pipelines",
        "for model in sys.argv[1:]:",
        "    pipeline = BaseChronosPipeline.from_pretrained(model)",
        "    torch.manual_seed(0)",
        "    found, _ = pipeline.predict_quantiles([torch.arange(30.0)], prediction_length=4)",
        "    print(json.dumps([type(pipeline).__name__, found[0].tolist()]))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *map(str, models)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    names, values = zip(*(json.loads(line) for line in done.stdout.splitlines()), strict=True)
    assert names == ("ChronosBoltPipeline", "ChronosPipeline")
    for model, value in zip(models, values, strict=True):
        torch.testing.assert_close(torch.tensor(value), forecast(model).float())


@pytest.mark.parametrize(
    ("family", "way"), [("chronos-bolt", "schedule"), ("chronos-t5", "architecture")]
)
def test_uniform_smaller_size_is_a_stock_checkpoint(family: str, way: str, tmp_path: Path) -> None:
    if way == "architecture":
        recipe = shaped(family, d_kv=3)
    else:  # a schedule that gives every layer the same size
        recipe = short(family, schedule={"d_0": 3, "alpha": 0})
    model = trained(recipe, tmp_path)
    assert not (model / "plan.json").exists()
    config = json.loads((model / "config.json").read_text())
    assert (config["model_type"], config["d_kv"]) == ("t5", 3)
    stock = BaseChronosPipeline.from_pretrained(model)
    assert len(stock.inner_model.encoder.block[0].layer[0].SelfAttention.q.weight) == 4 * 3
    assert torch.equal(forecast(stock), forecast(model))


def test_scheduled_model_is_profiled_evaluated_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(short("chronos-bolt").model_dump(mode="json"))
    )
    out, model = tmp_path / "chronos-bolt-tiny", str(tmp_path / "chronos-bolt-tiny" / "model")
    commands = [
        ["pretrain", str(tmp_path / "recipe.yaml"), "--output", str(out)],
        ["profile", model, "--weights-only"],
        ["evaluate", model, "--dataset", "monash_m1_yearly", "--max-series", "2"],
        [
            "bench",
            model,
            "--batch-size",
            "1",
            "--context-length",
            "32",
            "--repeats",
            "1",
            "--no-memory",
        ],
        ["pretrain", str(tmp_path / "recipe.yaml"), "--output", str(out), "--resume"],
    ]
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["tscompress", *command])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        assert not end.value.code, shown.err
        if command[0] == "pretrain":
            assert "opens it after `import tscompress.pipelines`" in shown.out


def test_unverified_pretraining_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(directory: Path, **options: str) -> loading.LoadedModel:
        loaded = loading.load(directory, **options)
        with torch.no_grad():
            loaded.model.get_parameter("shared.weight")[0] += 1
        return loaded

    monkeypatch.setattr("tscompress.compression.verify.load", other)
    with pytest.raises(VerificationError, match="does not load back"):
        pretrain(short("chronos-bolt", steps=1), tmp_path)
    assert not (tmp_path / "model").exists()
    assert (tmp_path / "checkpoint" / "state.safetensors").exists()


# --------------------------------------------------------------------------------------------------
# Stopped and resumed
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("chronos-bolt", {"precision": "bf16"}),
        ("chronos-t5", {"freeze_embedding": True, "precision": "bf16", "snapshots": (0.5,)}),
    ],
)
def test_stopped_and_resumed_is_bit_equal(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    recipe = short(family, steps=4, **changes)
    whole = trained(recipe, tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert pretrain(recipe, tmp_path / "parts", report=stop, log_every=1) is None
    resumed = trained(recipe, tmp_path / "parts", resume=True)
    ours, theirs = weights(whole), weights(resumed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has had one step; those that would go on with it are refused."""
    output = tmp_path_factory.mktemp("begun")
    pretrain(short("chronos-bolt", steps=1), output)
    return output


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"schedule": None}, "schedule"),
        ({"schedule": {"d_0": 2, "alpha": 0.69}}, "schedule"),  # the same sizes, by chance
        ({"schedule": {"d_0": 3, "alpha": 0.7}}, "schedule"),
        ({"schedule": GROWING | {"powers_of_two": True}}, "schedule"),
        ({"embedding_from": "reference/bolt"}, "embedding_from"),
        ({"freeze_embedding": True}, "freeze_embedding"),
    ],
)
def test_resuming_with_another_schedule_or_embedding_is_refused(
    changes: dict[str, object], name: str, begun: Path
) -> None:
    before = (begun / "checkpoint" / "state.safetensors").read_bytes()
    with pytest.raises(RecipeError, match=f"with {name} ") as error:
        pretrain(short("chronos-bolt", **changes), begun, resume=True)
    assert "\n" not in str(error.value)
    assert (begun / "checkpoint" / "state.safetensors").read_bytes() == before


def test_command_refuses_schedules_in_one_line(
    begun: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = short("chronos-bolt", schedule=GROWING | {"alpha": 0.5})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    paths = [str(tmp_path / "recipe.yaml"), "--output", str(begun)]
    monkeypatch.setattr(sys, "argv", ["tscompress", "pretrain", *paths, "--resume"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "was begun with schedule" in line


def test_a_dense_run_does_not_go_on_with_a_schedule(tmp_path: Path) -> None:
    pretrain(short("chronos-t5", steps=1, schedule=None), tmp_path)
    with pytest.raises(RecipeError, match="schedule None"):
        pretrain(short("chronos-t5"), tmp_path, resume=True)


# --------------------------------------------------------------------------------------------------
# The embedding
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TRAINED)
def test_the_embedding_of_a_trained_model_is_reused(
    family: str, checkpoints: dict[str, Path]
) -> None:
    source = str(checkpoints[family])
    given = embedding(loading.load(source).model)
    scratch = embedding(build_model(short(family, seed=7)))
    reused = build_model(short(family, seed=7, embedding_from=source))
    assert given.keys() == scratch.keys() == embedding(reused).keys()
    assert len(given) == (1 if family == "chronos-t5" else 7)
    assert all(torch.equal(given[name], tensor) for name, tensor in embedding(reused).items())
    assert any(not torch.equal(scratch[name], given[name]) for name in given) or (
        family == "chronos-t5"  # the smooth table leaves nothing but special tokens to chance
    )


def test_the_output_layer_of_t5_is_the_reused_table(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = str(checkpoints["chronos-t5"])
    given = embedding(loading.load(source).model)["shared.weight"]
    recipe = short("chronos-t5", embedding_from=source, freeze_embedding=True)
    model: Any = build_model(recipe)
    assert model.lm_head.weight is model.shared.weight
    loaded: Any = loading.load(trained(recipe, tmp_path)).model
    assert loaded.lm_head.weight is loaded.shared.weight
    assert torch.equal(loaded.lm_head.weight, given.to(torch.bfloat16))


@pytest.mark.parametrize("family", TRAINED)
def test_a_frozen_embedding_stays(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = checkpoints[family]
    given = embedding(loading.load(source).model)
    ends = [
        weights(
            trained(
                short(family, embedding_from=str(source), freeze_embedding=frozen),
                tmp_path / str(frozen),
            )
        )
        for frozen in (True, False)
    ]
    for name, tensor in given.items():
        assert torch.equal(ends[0][name], tensor.to(torch.bfloat16)), name
    assert any(not torch.equal(ends[1][name], given[name].to(torch.bfloat16)) for name in given)
    projection = "encoder.block.1.layer.0.SelfAttention.v.weight"
    assert not torch.equal(ends[0][projection], ends[1][projection])


def test_resumed_run_does_not_read_its_source(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.symlink_to(checkpoints["chronos-bolt"])
    recipe = short("chronos-bolt", embedding_from=str(source), checkpoint_minutes=1e-9)
    model = trained(recipe, tmp_path / "out")
    before = weights(model)
    source.unlink()
    again = trained(recipe, tmp_path / "out", resume=True)
    after = weights(again)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unfit_source_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    bolt = str(checkpoints["chronos-bolt"])
    refused = [
        (short("chronos-t5", embedding_from=bolt), r"is a chronos-bolt model; the recipe's"),
        (
            short("chronos-bolt", embedding_from="reference/bolt"),
            r"shared.weight of 'reference/bolt' is \(2, 256\); the recipe's architecture makes it "
            r"\(2, 24\)",
        ),
        (
            shaped("chronos-bolt", d_ff=48).model_copy(update={"embedding_from": bolt}),
            r"input_patch_embedding.hidden_layer.weight of .* is \(40, 32\); .* \(48, 32\)",
        ),
        (
            shaped("chronos-t5", vocab_size=32).model_copy(
                update={"embedding_from": str(checkpoints["chronos-t5"])}
            ),
            r"shared.weight of .* is \(64, 24\); .* \(32, 24\)",
        ),
        (short("chronos-bolt", embedding_from=str(tmp_path / "nothing")), "there is no directory"),
    ]
    for recipe, message in refused:
        with pytest.raises(TscompressError, match=message) as error:
            pretrain(recipe, tmp_path / "out")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------
# Recipes
# --------------------------------------------------------------------------------------------------


def test_the_recipes_of_table_3_size_heads_as_the_paper_says() -> None:
    dense = load_pretrain_recipe(RECIPES / "by-design-t5.yaml")
    schedule = PowerLawSchedule(kind="power-law", d_0=3, alpha=0.27)
    _, plan = design(dense.model_copy(update={"schedule": schedule}))
    assert plan is not None
    sizes = {head.name: head.qk_size for head in plan.heads}
    stacks = {"encoder.{}.SelfAttention": 0, "decoder.{}.SelfAttention": 0}
    for pattern, start in (stacks | {"decoder.{}.EncDecAttention": 4}).items():
        stack, _, kind = pattern.partition(".{}.")
        index = 1 if kind == "EncDecAttention" else 0
        for layer in range(4):
            name = f"{stack}.block.{layer}.layer.{index}.{kind}"
            assert sizes.pop(name) == math.ceil(3 * (1 + start + layer) ** 0.27)
    assert not sizes


def test_saving_a_dense_model_needs_no_plan(tmp_path: Path) -> None:
    save_pretrained(build_model(short("chronos-bolt", schedule=None)), tmp_path)
    assert not (tmp_path / "plan.json").exists()
