"""Rank profiles: planted ranks are found, and what is reported follows from them."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hooks import hook_count
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from rich.console import Console
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForTokenClassification,
    T5Model,
)

import tscompress
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.factor import apply_plan_, make_plan
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.plan.schedules import EpsilonSchedule, RankSchedule
from tscompress.plotting import ComparisonRow, comparison_figure
from tscompress.profiling.figures import (
    embedding_figure,
    flow_of_ranks_figure,
    per_head_figure,
    save_profile_figures,
    spectrum_figure,
    weight_rank_figure,
)
from tscompress.profiling.measure import (
    head_slices,
    profile,
    profile_embedding,
    profile_inputs,
    profile_weights,
)
from tscompress.profiling.rank_profile import InputProfile, RankProfile, Spectrum
from tscompress.profiling.tables import profile_table

LANGUAGE_MODELS = ("t5", "bert")
QUICK = CalibrationConfig(source="synthetic", num_series=16, context_length=48, batch_size=8)
# The shape of the tiny checkpoints: the inner width 4 x 8 differs from d_model.
D_MODEL, D_KV, HEADS, LAYERS, PATCH = 24, 8, 4, 2, 16
INNER = HEADS * D_KV


@pytest.fixture(scope="module")
def language_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a directory with a tiny random language model of it."""
    root = tmp_path_factory.mktemp("language")
    t5 = T5Config(
        d_model=D_MODEL, d_kv=D_KV, d_ff=40, num_layers=LAYERS, num_heads=HEADS, vocab_size=99
    )
    bert = BertConfig(
        hidden_size=D_MODEL,
        intermediate_size=40,
        num_hidden_layers=26,
        num_attention_heads=HEADS,
        vocab_size=9000,
        max_position_embeddings=16,
    )
    T5Model(t5).save_pretrained(root / "t5")
    BertModel(bert).save_pretrained(root / "bert")
    return {family: root / family for family in LANGUAGE_MODELS}


@pytest.fixture
def bolt(checkpoints: dict[str, Path]) -> LoadedModel:
    return load(checkpoints["chronos-bolt"])


#: Of a family: a model, its weights before its profile was made, that, and what was told.
Profiled = Callable[[str], tuple[LoadedModel, dict[str, torch.Tensor], RankProfile, list[Any]]]


@pytest.fixture(scope="module")
def profiled(checkpoints: dict[str, Path]) -> Profiled:
    @functools.cache
    def profile_once(family: str) -> Any:
        loaded, stages = load(checkpoints[family]), list[tuple[str, int, int]]()
        before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
        result = profile(loaded, calibration=QUICK, on_progress=lambda *step: stages.append(step))
        return loaded, before, result, stages

    return profile_once


@pytest.fixture(scope="module")
def bolt_profile(profiled: Profiled) -> RankProfile:
    return profiled("chronos-bolt")[2]


def _matrix(m: int, n: int, sigma: list[float]) -> torch.Tensor:
    """A random ``[m, n]`` matrix with the singular values ``sigma``."""
    generator = torch.Generator().manual_seed(m + n)
    U, _ = torch.linalg.qr(torch.randn(m, len(sigma), generator=generator))
    V, _ = torch.linalg.qr(torch.randn(n, len(sigma), generator=generator))
    return (U * torch.tensor(sigma)) @ V.T


def _plant(loaded: LoadedModel, name: str, W: torch.Tensor) -> None:
    with torch.no_grad():
        loaded.model.get_submodule(name).weight.copy_(W)


def _plant_low_rank_attention(loaded: LoadedModel, rank: int) -> None:
    for _, _, name in loaded.architecture.attention_projections():
        m, n = loaded.model.get_submodule(name).weight.shape
        _plant(loaded, name, _matrix(m, n, [1.0] * rank))


# Weights ------------------------------------------------------------------------------------------


def test_ranks_and_spectrum_of_a_known_matrix(bolt: LoadedModel) -> None:
    name = "encoder.block.1.layer.0.SelfAttention.k"
    sigma = [2.0, 1.0, 0.5, 0.05, 2e-3, 2e-4]
    _plant(bolt, name, _matrix(INNER, D_MODEL, sigma))
    (weight,) = (w for w in profile_weights(bolt, [0.2, 0.01, 1e-3, 1e-6]) if w.name == name)
    # sigma_j / sigma_1 is 1, .5, .25, .025, .001, .0001; the tail of a float32 matrix is rounding.
    assert weight.spectrum.ranks[:2] == (3, 4)
    assert weight.spectrum.ranks[3] >= 6
    assert weight.spectrum.full_rank == D_MODEL
    assert weight.spectrum.largest == pytest.approx(2.0, rel=1e-3)
    assert weight.spectrum.relative[:6] == pytest.approx([s / 2 for s in sigma], rel=2e-3)
    assert (weight.kind, weight.depth, weight.role) == ("encoder", 1, "k")


def test_every_spectrum_agrees_with_the_svd(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    for weight in profile_weights(loaded, [0.1]):
        W = loaded.model.get_submodule(weight.name).weight.detach().double()
        sigma = torch.linalg.svdvals(W)
        expected = (sigma / sigma[0]).tolist()
        assert weight.spectrum.relative == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert weight.parameters == W.numel()
        for head, spectrum in enumerate(weight.heads):
            rows = slice(head * D_KV, (head + 1) * D_KV)
            part = W[:, rows] if weight.role == "o" else W[rows]
            assert spectrum.largest == pytest.approx(
                float(torch.linalg.matrix_norm(part, 2)), rel=1e-3
            )


@pytest.mark.parametrize("role", ["q", "v", "o"])
def test_a_planted_head_is_found(bolt: LoadedModel, role: str) -> None:
    name = f"decoder.block.0.layer.1.EncDecAttention.{role}"
    W = bolt.model.get_submodule(name).weight.detach().clone()
    if role == "o":
        W[:, :D_KV] = _matrix(D_MODEL, D_KV, [1.0, 0.5])
    else:
        W[:D_KV] = _matrix(D_KV, D_MODEL, [1.0, 0.5])
    _plant(bolt, name, W)
    (weight,) = (w for w in profile_weights(bolt, [1e-3]) if w.name == name)
    assert [head.ranks[0] for head in weight.heads] == [2, D_KV, D_KV, D_KV]
    assert len(weight.heads) == HEADS


def test_head_slices_cover_the_matrix_once() -> None:
    W = torch.arange(24.0 * 10).reshape(24, 10)
    assert torch.equal(torch.cat(list(head_slices(W, "q", 4))), W)
    assert torch.equal(torch.cat(list(head_slices(W.T, "o", 4)), dim=1), W.T)


def test_factored_layers_show_the_rank_of_their_product(bolt: LoadedModel) -> None:
    plan = make_plan(bolt.model, bolt.architecture, "svd", RankSchedule(rank=3))
    apply_plan_(bolt, plan)
    result = profile(bolt, epsilons=[1e-4], calibration=QUICK)
    attention = [w for w in result.weights if w.part == "attention"]
    assert {weight.spectrum.ranks[0] for weight in attention} == {3}
    assert {weight.spectrum.full_rank for weight in attention} == {D_MODEL}
    assert {weight.parameters for weight in attention} == {3 * (INNER + D_MODEL)}
    assert result.savings[0].parameter_ratio == 1.0
    assert result.inputs


# Savings ------------------------------------------------------------------------------------------


def test_savings_follow_from_planted_ranks(bolt: LoadedModel) -> None:
    _plant_low_rank_attention(bolt, 2)
    result = profile(bolt, epsilons=[0.1], calibration=None)
    (saving,) = (s for s in result.savings if s.part == "attention")
    projections = 4 * 3 * LAYERS
    assert saving.projections == saving.factored == projections
    assert saving.parameters_before == projections * INNER * D_MODEL
    assert saving.parameters_after == projections * 2 * (INNER + D_MODEL)
    removed = saving.parameters_before - saving.parameters_after
    assert saving.macs_saved == removed
    assert saving.bytes_saved == 4 * removed  # the checkpoint is float32
    before = sum(p.numel() for p in bolt.model.parameters())
    assert saving.model_parameter_ratio == pytest.approx((before - removed) / before)
    (fit,) = result.power_laws
    assert fit.d_0 == pytest.approx(2, rel=1e-3)
    assert fit.alpha == pytest.approx(0, abs=1e-3)
    assert any(f"leaves {saving.parameter_ratio:.1%}" in line for line in result.findings())


@pytest.mark.parametrize("epsilon", [0.8, 0.6, 0.3])
def test_savings_agree_with_the_plan(bolt: LoadedModel, epsilon: float) -> None:
    plan = make_plan(bolt.model, bolt.architecture, "svd", EpsilonSchedule(epsilon=epsilon))
    result = profile(bolt, epsilons=[epsilon], calibration=None)
    assert result.savings[0].parameter_ratio == pytest.approx(plan.attention_parameter_ratio)


def test_findings_name_epsilons_without_savings(bolt_profile: RankProfile) -> None:
    assert all(s.factored == 0 for s in bolt_profile.savings if s.part == "attention")
    said = [line for line in bolt_profile.findings() if "nothing can be saved" in line]
    assert said == [
        "At ε = 0.3, 0.1, 0.03, 0.01 truncated SVD makes no attention projection smaller: "
        "nothing can be saved."
    ]


def test_findings_say_what_folding_could_do(bolt: LoadedModel, bolt_profile: RankProfile) -> None:
    full = " ".join(bolt_profile.findings())
    assert "heads are of full rank" in full
    assert "--ff-ratio" in full
    assert "tscompress sensitivity" in full
    _plant_low_rank_attention(bolt, 2)
    low = " ".join(profile(bolt, epsilons=[0.1], calibration=QUICK).findings())
    assert f"heads of {D_KV}" in low
    assert "(--rank 2)" in low
    assert "--fit 0.1" in low
    assert f"of the {D_MODEL} dimensions" in low
    assert "--width" in low


def test_no_cut_of_a_model_that_is_compressed_already_is_advised(
    bolt: LoadedModel, checkpoints: dict[str, Path]
) -> None:
    single = tscompress.FoldConfig(single_token=True)
    compressed = tscompress.compress(checkpoints["chronos-bolt"], fold=single)
    said = " ".join(profile(compressed, epsilons=[0.1], calibration=QUICK).findings())
    assert "compressed already: other sizes are folded from its original" in said
    for advice in ("--rank", "--fit", "--width", "--ff-ratio", "tscompress sensitivity"):
        assert advice not in said
    assert not profile(bolt, epsilons=[0.1], calibration=None).compressed


def test_the_advised_width_covers_what_cross_attention_reads(bolt_profile: RankProfile) -> None:
    def of_rank(entry: InputProfile) -> InputProfile:
        rank = 7 if entry.part == "encoder_output" else 3
        ranks = (rank,) * len(bolt_profile.epsilons)
        spectrum = entry.spectrum.model_copy(update={"ranks": ranks})
        return entry.model_copy(update={"spectrum": spectrum})

    inputs = tuple(of_rank(entry) for entry in bolt_profile.inputs)
    found = bolt_profile.model_copy(update={"inputs": inputs}).findings()
    assert "(--width 7)" in " ".join(found)


def test_ranks_that_may_be_rounding_are_named(checkpoints: dict[str, Path]) -> None:
    said = {}
    for dtype in ("float32", "bfloat16"):
        loaded = load(checkpoints["chronos-bolt"], dtype=dtype)
        result = profile(loaded, epsilons=[0.1, 1e-3], calibration=QUICK)
        said[dtype] = [line for line in result.findings() if "rounding" in line]
    assert result.weight_floor == result.input_floor == torch.finfo(torch.bfloat16).eps
    assert said["float32"] == []
    assert len(said["bfloat16"]) == 2
    assert all("ranks at ε = 0.001 may" in line for line in said["bfloat16"])


# Embedding ----------------------------------------------------------------------------------------


def test_rank_of_a_planted_token_table(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    with torch.no_grad():
        table = loaded.model.shared.weight
        table[2:] = _matrix(len(table) - 2, D_MODEL, [1.0, 0.9, 0.5])
        table[:2] = 100 * torch.randn(2, D_MODEL)  # special tokens do not count
    (group,) = profile_embedding(loaded, [1e-3])
    assert group.spectrum.ranks == (3,)
    assert group.rows == group.rows_total == len(table) - 2
    assert group.order == "value"
    spread = np.square(np.array(group.coordinates)).sum(axis=0)
    assert spread == pytest.approx([1.0, 0.81], rel=1e-2)
    angles = np.array(group.angles)
    assert angles.shape == (62, 62)
    assert np.allclose(np.diag(angles), 0, atol=2e-3)
    assert angles.max() <= np.pi / 2 + 1e-3


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_patches_are_embedded_as_the_model_does(checkpoints: dict[str, Path], family: str) -> None:
    loaded = load(checkpoints[family])
    seen: list[torch.Tensor] = []
    hook = loaded.model.input_patch_embedding.register_forward_hook(
        lambda module, args, output: seen.append(output.detach().flatten(0, 1).double())
    )
    series = [np.sin(np.arange(64, dtype=np.float32) * (1 + k) / 9) + k for k in range(6)]
    try:
        loaded.model(context=torch.tensor(np.array(series)))
    finally:
        hook.remove()
    expected = torch.linalg.svdvals(seen[0])
    given = profile_embedding(loaded, [0.1], series)[-1]
    assert given.name == "given series"
    assert given.rows == len(seen[0]) == 6 * 64 // PATCH
    assert given.spectrum.largest == pytest.approx(float(expected[0]), rel=1e-3)


def test_short_and_gappy_series_can_be_embedded(bolt: LoadedModel) -> None:
    series = [np.array([1.0, np.nan, 3.0], dtype=np.float32), np.ones(500, dtype=np.float32)]
    group = profile_embedding(bolt, [0.1], series)[-1]
    assert group.rows == 1 + 64 // PATCH  # patches without a value are left out
    assert np.isfinite(group.spectrum.relative).all()


def test_large_token_tables_are_sampled_and_deep_models_summarised(
    language_models: dict[str, Path],
) -> None:
    result = profile(load(language_models["bert"]), epsilons=[0.1])
    group = result.embedding[0]
    assert (group.rows, group.rows_total) == (8192, 9000)
    assert "8192 token embeddings (an even sample of 9000)" in result.findings()[0]
    assert profile_table(result)[1].row_count <= 12


# Inputs -------------------------------------------------------------------------------------------


def test_flow_of_ranks_starts_at_a_planted_embedding(bolt: LoadedModel) -> None:
    embedding = bolt.model.input_patch_embedding
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.zero_()
        embedding.residual_layer.weight.copy_(_matrix(D_MODEL, 2 * PATCH, [1.0, 1.0]))
    inputs = profile_inputs(bolt, [1e-4], QUICK)
    first = inputs[0]
    assert (first.kind, first.depth, first.part) == ("encoder", 0, "attention")
    # Two planted directions and the [REG] token; normalisation only scales rows.
    assert first.spectrum.ranks[0] == 3
    assert inputs[1].spectrum.ranks[0] > 3


def test_ranks_of_inputs_are_bounded(checkpoint: Path, profiled: Profiled) -> None:
    loaded, before, result, stages = profiled(checkpoint.name)
    blocks = loaded.architecture
    extra = any(block.kind == "cross" for block in blocks.attention)
    assert len(result.inputs) == len(blocks.attention) + len(blocks.feed_forward) + extra
    for entry in result.inputs:
        assert 1 <= entry.spectrum.ranks[0] <= entry.spectrum.ranks[-1]
        assert entry.spectrum.ranks[-1] <= entry.spectrum.full_rank <= min(entry.positions, D_MODEL)
    assert {stage for stage, done, total in stages if done == total} == {
        "embedding",
        "weights",
        "inputs",
    }
    assert all(torch.equal(before[name], t) for name, t in loaded.model.state_dict().items())
    assert hook_count(loaded.model) == 0


def test_given_series_are_embedded_and_run(bolt: LoadedModel) -> None:
    rng = np.random.default_rng(0)
    series = [rng.normal(size=60).astype(np.float32).cumsum() for _ in range(5)]
    result = profile(bolt, series=series, calibration=QUICK)
    assert result.corpus == "5 given series"
    assert result.embedding[-1].name == "given series"
    decoder = [entry for entry in result.inputs if entry.kind == "decoder"]
    assert {entry.positions for entry in decoder} == {5}
    assert any("fewer positions than they are wide" in line for line in result.findings())


def test_series_that_nothing_reads_are_refused(checkpoints: dict[str, Path]) -> None:
    series = [np.sin(np.arange(60.0))]
    with pytest.raises(UsageError, match=r"nothing here reads them: .* embedding only; give none"):
        profile(checkpoints["chronos-t5"], series=series, calibration=None)


@pytest.mark.parametrize("given", [np.stack, iter])
def test_series_are_an_array_or_come_one_by_one(
    bolt: LoadedModel, given: Callable[..., object]
) -> None:
    series = [np.sin(np.arange(60.0) / rate) for rate in (3, 5, 7)]
    result = profile(bolt, series=given(series), calibration=None)  # type: ignore[arg-type]
    assert result.embedding == profile(bolt, series=series, calibration=None).embedding
    assert result.embedding[-1].name == "given series"


def test_language_models_are_profiled_without_inputs(language_models: dict[str, Path]) -> None:
    result = profile(load(language_models["t5"]))
    assert result.inputs == ()
    assert result.inputs_reason == (
        "t5 models do not forecast, so no series can be run through them"
    )
    assert {weight.part for weight in result.weights} == {"attention", "feed_forward"}
    assert any("no flow of ranks" in line for line in result.findings())
    with pytest.raises(UsageError, match="do not forecast"):
        flow_of_ranks_figure(result)


# Results ------------------------------------------------------------------------------------------


def test_json_round_trip(bolt_profile: RankProfile, tmp_path: Path) -> None:
    written = bolt_profile.save(tmp_path / "new")
    assert [path.name for path in written] == ["profile.json", "ranks.csv"]
    stored = json.loads(written[0].read_text(encoding="utf-8"))
    assert RankProfile.model_validate(stored) == bolt_profile
    rows = list(csv.DictReader(written[1].read_text(encoding="utf-8").splitlines()))
    matrices = len(bolt_profile.embedding) + len(bolt_profile.inputs) + len(bolt_profile.weights)
    heads = sum(len(weight.heads) for weight in bolt_profile.weights)
    assert len(rows) == (matrices + heads) * len(bolt_profile.epsilons)
    assert all(int(row["rank"]) <= int(row["full_rank"]) for row in rows)


def test_tables_fit_a_terminal(checkpoint: Path, profiled: Profiled) -> None:
    result = profiled(checkpoint.name)[2]
    console = Console(width=100)
    with console.capture() as captured:
        for table in profile_table(result):
            console.print(table)
    text = captured.get()
    assert "…" not in text
    assert len(profile_table(result)) == 4


@pytest.mark.parametrize("epsilons", [[], [0.0], [0.1, 1.0], [1e-9]])
def test_impossible_epsilons(bolt: LoadedModel, epsilons: list[float]) -> None:
    with pytest.raises(UsageError, match=r"epsilons must lie in \[1e-06, 1\)"):
        profile(bolt, epsilons=epsilons, calibration=None)


def test_epsilons_are_sorted(bolt: LoadedModel) -> None:
    result = profile(bolt, epsilons=[0.01, 0.5, 0.1, 0.5], calibration=None)
    assert result.epsilons == (0.5, 0.1, 0.01)
    for weight in result.weights:
        assert list(weight.spectrum.ranks) == sorted(weight.spectrum.ranks)


# Figures ------------------------------------------------------------------------------------------


def _labelled(figure: Figure) -> bool:
    """Whether some panel says what each axis is, and no visible panel is without data."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    return (
        any(axes.get_xlabel() for axes in panels)
        and any(axes.get_ylabel() for axes in panels)
        and all(axes.has_data() or axes.collections for axes in panels)
    )


@pytest.mark.parametrize(
    "draw",
    [
        embedding_figure,
        weight_rank_figure,
        per_head_figure,
        flow_of_ranks_figure,
        spectrum_figure,
    ],
)
def test_figures_have_labels(
    bolt_profile: RankProfile, draw: Callable[[RankProfile], Figure]
) -> None:
    assert _labelled(draw(bolt_profile))


@pytest.mark.usefixtures("drawn_figures")
def test_figures_are_saved(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    result = profile(load(checkpoints["chronos-t5"]), epsilons=[0.1], calibration=QUICK)
    paths = save_profile_figures(result, tmp_path / "figures")
    assert [path.stem for path in paths] == [
        "embedding",
        "weight_ranks",
        "spectra",
        "head_ranks",
        "flow_of_ranks",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_model_around_stacks_of_t5_is_refused(tmp_path: Path) -> None:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    T5ForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a T5ForTokenClassification is not supported"):
        profile(tmp_path, calibration=None)


def test_figures_without_inputs(language_models: dict[str, Path], tmp_path: Path) -> None:
    result = profile(load(language_models["t5"]), epsilons=[0.1])
    paths = save_profile_figures(result, tmp_path)
    assert "flow_of_ranks" not in [path.stem for path in paths]


def test_figure_of_one_epsilon(bolt_profile: RankProfile) -> None:
    assert "ε = 0.1" in per_head_figure(bolt_profile, 0.1).get_suptitle()
    with pytest.raises(UsageError, match=r"no ε = 0\.2; it has 0\.3, 0\.1"):
        per_head_figure(bolt_profile, 0.2)


def test_heads_of_sizes_by_layer_have_their_own_full_rank(bolt_profile: RankProfile) -> None:
    sizes = list(range(8, 0, -1))

    def narrowed(spectrum: Spectrum, depth: int) -> Spectrum:
        return spectrum.model_copy(update={"full_rank": sizes[depth]})

    weights = tuple(
        weight.model_copy(
            update={"heads": tuple(narrowed(head, weight.depth) for head in weight.heads)}
        )
        for weight in bolt_profile.weights
    )
    figure = per_head_figure(bolt_profile.model_copy(update={"weights": weights}))
    kinds = dict.fromkeys(weight.kind for weight in weights if weight.heads)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        (steps,) = axes.patches
        assert isinstance(steps, StepPatch)
        depths = sorted({w.depth for w in weights if w.heads and w.kind == kind})
        assert steps.get_data().values.tolist() == [sizes[depth] for depth in depths]
        assert len(depths) > 1


def test_comparison_figure_skips_unmeasured_values() -> None:
    rows = [ComparisonRow("svd", 1.01, 0.99, None, 0.8), ComparisonRow("fold", 1.0, 1.0, 0.6, 0.5)]
    figure = comparison_figure(rows)
    assert figure.axes[0].get_xlabel() == "ratio to the original (below 1 is better)"
    drawn = {line.get_label(): len(line.get_xdata()) for line in figure.axes[0].lines}
    assert (drawn["WQL"], drawn["latency"]) == (2, 1)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["svd", "fold"]
