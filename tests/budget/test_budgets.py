"""What is chosen fits the budget to the last unit, and nothing cheaper and better is left out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chronos.chronos2 import Chronos2Model
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fixtures import FAMILIES, tiny_chronos2, tiny_recipe

from tscompress.benchmark.bench import bench
from tscompress.benchmark.sizes import count_macs, parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.budget import candidate_latency
from tscompress.budget.candidate_latency import latency_of
from tscompress.budget.candidates import Candidate, efficient, folded_candidates
from tscompress.budget.costs import CostModel
from tscompress.budget.part_costs import Costs, Measure
from tscompress.budget.search import choose_factored, choose_folded
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.checkpoints.load import load
from tscompress.compression.fold_plans import fold_plan
from tscompress.errors import FactorizationError, PlanError, UsageError
from tscompress.families.registry import describe
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import Budget, parse_budget
from tscompress.training.pretrain_model import build_model

WORKLOAD = Workload(batch_size=3, context_length=37, horizon=9, num_samples=5, threads=1)
HEAD_SIZES, UNIT_SIZES = (6, 4, 2), (30, 20, 10)
MEASURES: tuple[Measure, ...] = ("parameters", "bytes", "macs", "kv-cache")
RATIOS = (1.0, 0.9, 0.7, 0.5)


def tiny_model(family: str, **shape: int) -> Any:
    if family == "chronos-2":
        shape.pop("num_decoder_layers", None)
        config = tiny_chronos2().config.to_dict()
        return Chronos2Model(Chronos2Model.config_class(**config | shape)).eval()
    architecture = tiny_recipe(family).architecture.model_copy(update=shape)
    return build_model(tiny_recipe(family, architecture=architecture)).eval()


def cost_model_of(family: str, model: Any) -> CostModel:
    return CostModel(family, model, WORKLOAD, bytes_per_number=4)


def sensitivity_of(
    family: str,
    model: Any,
    loss: Callable[[str, str, int], float] | int = 0,
    head_sizes: tuple[int, ...] = HEAD_SIZES,
    unit_sizes: tuple[int, ...] = UNIT_SIZES,
) -> Sensitivity:
    """Of all parts of a model. ``loss`` gives one by name, kind and size, or seeds random ones."""
    rng = random.Random(loss if isinstance(loss, int) else 0)

    def part(name: str, kind: Any, size: int, sizes: tuple[int, ...]) -> Part:
        if callable(loss):
            losses = tuple(loss(name, kind, max(1, each)) for each in sizes)
        else:  # some parts cost nothing at their largest sizes
            scale = 10 ** rng.uniform(-4, -1)
            losses = tuple(sorted(max(0.0, scale * rng.uniform(-0.2, 1)) for _ in sizes))
        return Part(name=name, kind=kind, size=size, sizes=sizes, losses=losses)

    architecture = describe(family, model)
    parts = []
    for block in architecture.attention:
        size = model.get_submodule(block.projections["q"]).out_features // block.num_heads
        sizes = tuple(n for n in head_sizes if block.kind != "time" or n % 2 == 0)
        parts += [part(block.name, "qk", size, sizes), part(block.name, "vo", size, head_sizes)]
    units = model.config.d_ff
    patches = [n for n, _ in model.named_children() if n.endswith("patch_embedding")]
    for name in [block.name for block in architecture.feed_forward] + patches:
        parts.append(part(name, "hidden", units, unit_sizes))
    for stack in ("encoder", "decoder"):
        for index in range(len(model.get_submodule(stack).block) if hasattr(model, stack) else 0):
            parts.append(part(f"{stack}.block.{index}", "layer", 1, (0,)))
    return Sensitivity(family=family, base_loss=1.0, parts=tuple(parts))


def plan_of(candidate: Candidate, family: str, model: Any) -> Plan:
    """``model`` has the layers that the candidate keeps."""
    return fold_plan(
        model,
        describe(family, model),
        qk=candidate.qk,
        vo=candidate.vo,
        hidden=candidate.hidden,
        kept_layers=candidate.kept_layers,
        free_frequencies=isinstance(candidate.qk, Mapping),
    )


def predicted(candidate: Candidate, sensitivity: Sensitivity) -> float:
    """Loss summed over the parts of a candidate that keeps all layers."""
    total = 0.0
    for part in sensitivity.parts:
        if part.kind != "layer":
            sizes = getattr(candidate, part.kind)
            size = sizes if isinstance(sizes, int) else sizes[part.name]
            total += sensitivity.cost(part.name, part.kind, size)
    return total


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    with torch.random.fork_rng():
        return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def priced(models: dict[str, Any]) -> dict[str, Any]:
    """Family to its model and a cost model that no test changes."""
    return {family: (model, cost_model_of(family, model)) for family, model in models.items()}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --------------------------------------------------------------------------------------------------
# The budget as text
# --------------------------------------------------------------------------------------------------

RATIO_OF = st.sampled_from((*MEASURES, "latency")).flatmap(
    lambda measure: st.builds(
        Budget, measure=st.just(measure), ratio=st.floats(0, 1, exclude_min=True)
    )
)
LIMIT_OF = st.builds(
    Budget,
    measure=st.sampled_from(MEASURES),
    limit=st.one_of(
        st.integers(2, 10**18),
        st.integers(2, 999).flatmap(lambda n: st.sampled_from([n * 10**6, n * 2**20, n * 1500])),
    ),
)
PERCENT_OF = st.builds(
    Budget,
    measure=st.just("wql"),
    percent=st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False),
)


@given(st.one_of(RATIO_OF, LIMIT_OF, PERCENT_OF))
def test_a_budget_written_is_the_budget_read(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget
    assert Budget.model_validate(budget.model_dump()) == budget


@pytest.mark.parametrize(
    "text",
    [
        "parameters=0.5", "bytes=20MB", "macs=0.4", "kv-cache=0.125", "latency=0.4", "wql=1%",
        "wql=0.5%", "parameters=1", "parameters=4M", "macs=2.5G", "bytes=1.5GiB", "kv-cache=999B",
    ],
)  # fmt: skip
def test_a_budget_gives_its_text_back(text: str) -> None:
    assert str(parse_budget(text)) == text


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("bytes=20MB", 20_000_000),
        ("bytes=20 mib", 20 * 2**20),
        ("bytes=1.1KiB", 1126),  # whole bytes that fit
        ("kv-cache=20000", 20_000),
        ("parameters=1.5k", 1500),
        ("parameters=2e6", 2_000_000),
        ("macs=2T", 2 * 10**12),
    ],
)
def test_units(text: str, limit: int) -> None:
    assert parse_budget(text) == Budget(measure=parse_budget(text).measure, limit=limit)


@pytest.mark.parametrize(
    "text",
    [
        "", "parameters", "speed=0.5", "parameters=", "parameters=0", "parameters=-0.5",
        "parameters=1.5", "parameters=nan", "parameters=inf", "parameters=50%", "parameters=20MB",
        "bytes=20XB", "bytes=1B", "bytes=1e999GB", "latency=1.5", "latency=20", "latency=3M",
        "wql=1", "wql=0.01", "wql=0%", "wql=1e999%", "bytes=0.5=2",
    ],
)  # fmt: skip
def test_invalid_budgets_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="budget") as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"measure": "parameters"},
        {"measure": "bytes", "ratio": 0.5, "limit": 100},
        {"measure": "latency", "limit": 100},
        {"measure": "wql", "ratio": 0.5},
        {"measure": "macs", "percent": 1.0},
    ],
)
def test_a_budget_has_one_amount_of_its_own_kind(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{fields['measure']} takes"):
        Budget.model_validate(fields)


# --------------------------------------------------------------------------------------------------
# Plain configs
# --------------------------------------------------------------------------------------------------


def test_candidates_are_priced_exactly(models: dict[str, Any], family: str) -> None:
    model, costs = models[family], cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, model)
    candidates = folded_candidates(sensitivity, costs)
    # Rotary frequencies allow sizes that divide 8.
    sizes = {8, 4, 2} if family == "chronos-2" else {8, 6, 4, 2}
    assert {candidate.qk for candidate in candidates} == sizes
    assert len(candidates) == len(sizes) * 4
    for candidate in candidates:
        plan = plan_of(candidate, family, model)
        assert plan.uniform_sizes == (candidate.qk, candidate.hidden)
        assert candidate.costs == costs.of_plan(plan)
        assert candidate.loss == pytest.approx(predicted(candidate, sensitivity))
    original = candidates[0]
    assert (original.costs, original.loss) == (costs.original, 0)
    assert str(original) == "d_kv 8, d_ff 40"


def test_candidates_with_fewer_layers_are_priced_exactly(family: str) -> None:
    model = tiny_model(family, num_layers=3, num_decoder_layers=3)
    costs = cost_model_of(family, model)
    candidates = folded_candidates(sensitivity_of(family, model), costs, depth=True)
    depths = {str(one.kept_layers): one for one in candidates if one.hidden == 20 and one.qk == 4}
    assert len(depths) == (3 if family == "chronos-2" else 5)
    for candidate in depths.values():
        kept = candidate.kept_layers or {"encoder": (0, 1, 2), "decoder": (0, 1, 2)}
        smaller = tiny_model(
            family,
            num_layers=len(kept["encoder"]),
            num_decoder_layers=len(kept.get("decoder", ())),
        )
        assert candidate.costs == costs.of_plan(plan_of(candidate, family, smaller))


def test_layers_that_cost_least_go_first(family: str) -> None:
    model = tiny_model(family, num_layers=3, num_decoder_layers=3)
    stacks = ["encoder"] if family == "chronos-2" else ["encoder", "decoder"]
    losses = {f"{stack}.block.{i}": 0.1 * (3 - i) for stack in stacks for i in range(3)}
    if family != "chronos-2":  # the encoder's cost least
        losses |= {f"decoder.block.{i}": 1.0 + i for i in range(3)}
    sensitivity = sensitivity_of(family, model, lambda name, kind, size: losses.get(name, 0.0))
    candidates = folded_candidates(sensitivity, cost_model_of(family, model), depth=True)
    full = [one for one in candidates if (one.qk, one.hidden) == (8, 40)]
    kept = [one.kept_layers for one in full]
    everything = (0, 1, 2)
    if family == "chronos-2":
        assert kept == [None, {"encoder": (0, 1)}, {"encoder": (0,)}]
        assert [one.loss for one in full] == pytest.approx([0, 0.1, 0.3])
    elif family == "chronos-bolt":
        assert kept == [
            None,
            {"encoder": (0, 1), "decoder": everything},
            {"encoder": (0,), "decoder": everything},
            {"encoder": (0,), "decoder": (1, 2)},
            {"encoder": (0,), "decoder": (2,)},
        ]
        assert [one.loss for one in full] == pytest.approx([0, 0.1, 0.3, 1.3, 3.3])
    else:  # an encoder's layer goes once a decoder's went
        assert kept == [
            None,
            {"encoder": everything, "decoder": (1, 2)},
            {"encoder": (0, 1), "decoder": (1, 2)},
            {"encoder": (0, 1), "decoder": (2,)},
            {"encoder": (0,), "decoder": (2,)},
        ]
    assert all(
        len(one.kept_layers["encoder"]) >= len(one.kept_layers["decoder"])
        for one in candidates
        if one.kept_layers and family == "chronos-t5"
    )


@pytest.mark.parametrize("multiple", [1, 2, 4, 8, 16])
def test_multiples(models: dict[str, Any], family: str, multiple: int) -> None:
    model, costs = models[family], cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, model)
    budget = Budget(measure="parameters", ratio=0.8 if multiple < 8 else 0.95)
    candidates = folded_candidates(sensitivity, costs, multiple=multiple)
    factored = choose_factored(sensitivity, costs, budget, multiple=multiple)
    sizes = {
        size
        for one in (*candidates, factored)
        for kind in (one.qk, one.vo, one.hidden)
        for size in ([kind] if isinstance(kind, int) else kind.values())
    }
    assert all(size % multiple == 0 or size in (8, 40) for size in sizes)
    if multiple == 16:
        assert {one.hidden for one in candidates} == {40, 32, 16}  # 30, 20 and 10 rounded up
        assert {one.qk for one in candidates} == {8}
    with pytest.raises(PlanError, match="multiples of 0"):
        folded_candidates(sensitivity, costs, multiple=0)


def test_heads_are_no_wider_than_the_stream(models: dict[str, Any], family: str) -> None:
    model, costs = models[family], cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, model)
    every = {one.qk for one in folded_candidates(sensitivity, costs)}
    assert every == {one.qk for one in folded_candidates(sensitivity, costs, width=max(every))}
    for width in (sorted(every)[-2], 1):
        offered = {one.qk for one in folded_candidates(sensitivity, costs, width=width)}
        assert offered == ({size for size in every if size <= width} or {min(every)})


def test_unusable_sensitivities_are_refused(models: dict[str, Any]) -> None:
    costs = cost_model_of("chronos-t5", models["chronos-t5"])
    sensitivity = sensitivity_of("chronos-t5", models["chronos-t5"])
    for kind, match in (("hidden", "hidden"), ("layer", "layers")):
        parts = tuple(part for part in sensitivity.parts if part.kind != kind)
        with pytest.raises(PlanError, match=match):
            folded_candidates(sensitivity.model_copy(update={"parts": parts}), costs, depth=True)
    other = sensitivity_of("chronos-2", models["chronos-2"])
    with pytest.raises(PlanError, match="the model has no"):
        folded_candidates(other, costs)


CANDIDATES = st.lists(
    st.builds(
        lambda loss, parameters: Candidate(8, 8, 40, None, loss / 4, Costs(parameters=parameters)),
        st.integers(0, 8),
        st.integers(0, 8),
    ),
    max_size=20,
)


@given(CANDIDATES)
def test_efficient_candidates_are_undominated(candidates: list[Candidate]) -> None:
    kept = efficient(candidates, "parameters")
    for one in candidates:
        beaten = any(
            other.costs.parameters <= one.costs.parameters and other.loss < one.loss
            for other in candidates
        )
        assert (one in kept) != beaten
    assert [one.loss for one in kept] == sorted(one.loss for one in kept)
    assert [-one.costs.parameters for one in kept] == sorted(-one.costs.parameters for one in kept)


# --------------------------------------------------------------------------------------------------
# Budgets that are counted
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
def test_the_best_within_the_budget(models: dict[str, Any], family: str, measure: Measure) -> None:
    costs = cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, models[family])
    candidates = folded_candidates(sensitivity, costs, depth=True)
    original = costs.original.of(measure)
    if not original:
        for choose in (
            lambda budget: choose_folded(candidates, budget, costs),
            lambda budget: choose_factored(sensitivity, costs, budget),
        ):
            with pytest.raises(PlanError, match="chronos-2 model has no kv-cache"):
                choose(Budget(measure=measure, ratio=0.5))
        return
    for ratio in RATIOS:
        chosen = choose_folded(candidates, Budget(measure=measure, ratio=ratio), costs)
        fitting = [one for one in candidates if one.costs.of(measure) <= ratio * original]
        assert chosen in fitting
        assert chosen.loss == min(one.loss for one in fitting)
        assert chosen.costs.of(measure) == min(
            one.costs.of(measure) for one in fitting if one.loss == chosen.loss
        )
        # The same figure as an absolute limit, and nothing fits one less but worse.
        limit = chosen.costs.of(measure) + (costs.header_bytes if measure == "bytes" else 0)
        assert choose_folded(candidates, Budget(measure=measure, limit=limit), costs) == chosen
        tighter = choose_folded(candidates, Budget(measure=measure, limit=limit - 1), costs)
        assert tighter.loss > chosen.loss


@pytest.mark.parametrize("measure", MEASURES[:3])
def test_the_smallest_reachable_is_named(
    models: dict[str, Any], family: str, measure: Measure
) -> None:
    costs = cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, models[family])
    candidates = folded_candidates(sensitivity, costs)
    budget = Budget(measure=measure, ratio=0.001)
    match = rf"{measure}=0.001 .* d_kv 2, d_ff 10, "
    with pytest.raises(PlanError, match=match) as folded:
        choose_folded(candidates, budget, costs)
    with pytest.raises(PlanError, match=match):
        choose_factored(sensitivity, costs, budget)
    ratio = float(str(folded.value).split("which is ")[1].split(" of ")[0])
    smallest = choose_folded(candidates, Budget(measure=measure, ratio=ratio), costs)
    assert (smallest.qk, smallest.hidden) == (2, 10)
    if measure == "bytes":  # less than a header alone
        with pytest.raises(PlanError, match="bytes=10B allows 0;"):
            choose_folded(candidates, Budget(measure=measure, limit=10), costs)


def test_a_ratio_means_its_decimals(models: dict[str, Any]) -> None:
    costs = cost_model_of("chronos-t5", models["chronos-t5"])
    costs.original = Costs(parameters=100)
    exact = Candidate(4, 4, 20, None, 0.1, Costs(parameters=29))
    # 0.29 * 100 is 28.999999999999996
    assert choose_folded([exact], Budget(measure="parameters", ratio=0.29), costs) == exact


def test_the_best_of_each_width_is_measured_before_one_is_chosen(models: dict[str, Any]) -> None:
    costs = cost_model_of("chronos-2", models["chronos-2"])
    costs.original = Costs(parameters=100)
    within = Costs(parameters=40)
    candidates = [
        Candidate(8, 8, units, None, loss + worse, within, width)
        for loss, width in ((0.2, 24), (0.1, None), (0.3, 16), (0.4, 12), (0.5, 8))
        for units, worse in ((20, 0.0), (10, 0.05))
    ]
    budget, seen = Budget(measure="parameters", ratio=0.4), list[Candidate]()

    def loss_of(candidate: Candidate) -> float:
        seen.append(candidate)
        return {None: 0.3, 24: 0.2, 16: 0.25, 12: 0.1, 8: 0.0}[candidate.width]

    def chosen(candidates: list[Candidate], **how: Any) -> int | None:
        return choose_folded(candidates, budget, costs, **how).width

    assert chosen(candidates) is None
    assert chosen(candidates, measure_loss=loss_of) == 12
    assert [(one.width, one.hidden) for one in seen] == [(None, 20), (24, 20), (16, 20), (12, 20)]
    seen.clear()
    assert chosen(candidates[:2], measure_loss=loss_of) == 24  # there is no other width
    whole = Candidate(8, 8, 40, None, 0.0, costs.original)
    at_most = Budget(measure="parameters", ratio=1)
    assert choose_folded([*candidates, whole], at_most, costs, measure_loss=loss_of) == whole
    assert not seen
    with pytest.raises(FactorizationError, match=r"parameters=0\.4"):
        chosen(candidates, measure_loss=lambda _: math.inf)


# --------------------------------------------------------------------------------------------------
# Sizes by layer
# --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    family=st.sampled_from(FAMILIES),
    measure=st.sampled_from(MEASURES),
    ratio=st.floats(0.5, 1),
    seed=st.integers(1, 10**6),
)
def test_never_worse_than_a_plain_config(
    priced: dict[str, Any], family: str, measure: Measure, ratio: float, seed: int
) -> None:
    if (family, measure) == ("chronos-2", "kv-cache"):
        return
    model, costs = priced[family]
    sensitivity = sensitivity_of(family, model, seed)
    budget = Budget(measure=measure, ratio=ratio)
    chosen = choose_factored(sensitivity, costs, budget)
    assert chosen.costs.of(measure) <= ratio * costs.original.of(measure)
    assert chosen.costs == costs.of_plan(plan_of(chosen, family, model))
    assert chosen.loss == pytest.approx(predicted(chosen, sensitivity), abs=1e-12)
    plain = choose_folded(folded_candidates(sensitivity, costs), budget, costs)
    assert chosen.loss <= plain.loss


def test_budget_is_spent_on_the_least_loss(models: dict[str, Any]) -> None:
    model, costs = models["chronos-t5"], cost_model_of("chronos-t5", models["chronos-t5"])
    precious = "decoder.block.1.layer.1.EncDecAttention"
    sensitivity = sensitivity_of(
        "chronos-t5",
        model,
        lambda name, kind, size: (5.0 if (name, kind) == (precious, "vo") else 0.01) / size,
    )
    chosen = choose_factored(sensitivity, costs, Budget(measure="kv-cache", ratio=0.5))
    assert isinstance(chosen.vo, dict)
    assert isinstance(chosen.qk, dict)
    assert chosen.vo[precious] == 8
    others = [name for name in chosen.vo if "EncDec" in name and name != precious]
    assert all(chosen.vo[name] < 8 for name in others)
    # What holds no cache keeps its size.
    assert all(chosen.qk[name] == 8 for name in chosen.qk if name.startswith("encoder."))
    assert set(chosen.hidden.values()) == {40}  # type: ignore[union-attr]
    assert str(chosen) == "queries and keys 2 to 8, values 2 to 8, hidden units 40"


def test_a_jump_is_taken_if_it_is_the_better_bargain(models: dict[str, Any]) -> None:
    """Size 6 alone costs nearly as much as 2: the way there is no stop, unless it is enough."""
    model, costs = models["chronos-t5"], cost_model_of("chronos-t5", models["chronos-t5"])
    jump = "encoder.block.0.layer.0.SelfAttention"

    def loss(name: str, kind: str, size: int) -> float:
        if (name, kind) == (jump, "vo"):
            return {6: 0.9, 4: 0.95, 2: 1.0}[size]
        return 3.0 / size  # 0.5 at size 6: less than the first step, more than each on the way

    sensitivity = sensitivity_of("chronos-t5", model, loss, unit_sizes=())
    unit = 4 * (24 + 24)
    for saved, expected in ((6 * unit, 1.0), (8 * unit, 1.5)):
        budget = Budget(measure="parameters", limit=costs.original.parameters - saved)
        chosen = choose_factored(sensitivity, costs, budget)
        assert isinstance(chosen.vo, dict)
        assert chosen.vo[jump] == 2
        assert chosen.loss == pytest.approx(expected)


@pytest.mark.parametrize(("saved", "size"), [(1, 6), (384, 6), (385, 4), (768, 4), (769, 2)])
def test_a_jump_goes_no_further_than_needed(models: dict[str, Any], saved: int, size: int) -> None:
    model, costs = models["chronos-t5"], cost_model_of("chronos-t5", models["chronos-t5"])
    jump = "encoder.block.0.layer.0.SelfAttention"
    losses = {6: 0.9, 4: 0.95, 2: 1.0}
    sensitivity = sensitivity_of(
        "chronos-t5",
        model,
        lambda name, kind, size: losses[size] if (name, kind) == (jump, "vo") else 100 / size,
    )
    budget = Budget(measure="parameters", limit=costs.original.parameters - saved)
    chosen = choose_factored(sensitivity, costs, budget)
    assert isinstance(chosen.vo, dict)
    assert chosen.vo[jump] == size
    assert chosen.loss == pytest.approx(losses[size])


def test_unneeded_steps_are_undone(models: dict[str, Any]) -> None:
    """A cheap small step comes first; the big one after it meets the budget alone."""
    model, costs = models["chronos-t5"], cost_model_of("chronos-t5", models["chronos-t5"])
    small, big = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"

    def loss(name: str, kind: str, size: int) -> float:
        if (name, kind) == (small, "vo"):
            return {6: 0.10, 4: 10.0, 2: 20.0}[size]  # 2 x 4 x 24 x 2 = 384 parameters
        if name == big:
            return {30: 0.15, 20: 10.0, 10: 20.0}[size]  # 10 x 48 = 480 parameters
        return 1000.0 / size

    sensitivity = sensitivity_of("chronos-t5", model, loss)
    limit = costs.original.parameters - 450
    chosen = choose_factored(sensitivity, costs, Budget(measure="parameters", limit=limit))
    assert isinstance(chosen.vo, dict)
    assert isinstance(chosen.hidden, dict)
    assert (chosen.vo[small], chosen.hidden[big]) == (8, 30)
    assert chosen.loss == pytest.approx(0.15)


def test_sixty_blocks_are_within_their_budget() -> None:
    """A search over all combinations would not end."""
    model = tiny_model("chronos-t5", num_layers=20, num_decoder_layers=20, d_kv=64)
    costs = cost_model_of("chronos-t5", model)
    sensitivity = sensitivity_of("chronos-t5", model, 1, head_sizes=(48, 32, 24, 16, 8, 4))
    chosen = choose_factored(sensitivity, costs, Budget(measure="parameters", ratio=0.3))
    assert chosen.costs.parameters <= 0.3 * costs.original.parameters


# --------------------------------------------------------------------------------------------------
# Budgets that are measured
# --------------------------------------------------------------------------------------------------


def chooser(
    kind: str, sensitivity: Sensitivity, costs: CostModel
) -> tuple[Callable[..., Candidate], int]:
    """Either way to choose, and an upper bound on the number of candidates."""
    if kind == "folded":
        candidates = folded_candidates(sensitivity, costs)
        return lambda budget, **how: choose_folded(candidates, budget, costs, **how), 16
    count = sum(len(part.sizes) for part in sensitivity.parts if part.kind != "layer")
    return lambda budget, **how: choose_factored(sensitivity, costs, budget, **how), count


@pytest.mark.parametrize("kind", ["folded", "factored"])
def test_latency_is_measured(models: dict[str, Any], family: str, kind: str) -> None:
    costs = cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, models[family], 7)
    choose, count = chooser(kind, sensitivity, costs)
    measured: list[tuple[Candidate, float]] = []

    def latency(candidate: Candidate) -> float:  # a part of the time no plan changes
        return 0.3 + 0.7 * candidate.costs.macs / costs.original.macs

    chosen = choose(
        Budget(measure="latency", ratio=0.8),
        measure_latency=latency,
        on_measured=lambda candidate, ratio: measured.append((candidate, ratio)),
    )
    assert latency(chosen) <= 0.8
    assert all(ratio == latency(candidate) for candidate, ratio in measured)
    assert all(one.loss >= chosen.loss for one, ratio in measured if ratio <= 0.8)
    assert len(measured) <= math.log2(count) + 3
    if kind == "folded":
        fast = [c for c in folded_candidates(sensitivity, costs) if latency(c) <= 0.8]
        assert chosen.loss == min(candidate.loss for candidate in fast)


@pytest.mark.parametrize("kind", ["folded", "factored"])
def test_quality_is_measured(models: dict[str, Any], family: str, kind: str) -> None:
    costs = cost_model_of(family, models[family])
    sensitivity = sensitivity_of(family, models[family], 8)
    choose, count = chooser(kind, sensitivity, costs)
    largest = max(one.loss for one in folded_candidates(sensitivity, costs))
    percent = 100 * largest / 2  # half the predicted loss does harm: the prediction only orders
    measured: list[Candidate] = []

    def wql(candidate: Candidate) -> float:
        return 1 + 2 * candidate.loss

    chosen = choose(
        Budget(measure="wql", percent=percent),
        measure_wql=wql,
        on_measured=lambda candidate, ratio: measured.append(candidate),
    )
    assert wql(chosen) <= 1 + percent / 100
    assert chosen.costs.parameters < costs.original.parameters
    assert len(measured) <= math.log2(count) + 3
    if kind == "folded":
        good = [c for c in folded_candidates(sensitivity, costs) if 2 * c.loss <= percent / 100]
        assert chosen.costs.parameters == min(one.costs.parameters for one in good)


def test_non_monotone_measurements_are_searched() -> None:
    costs = cost_model_of("chronos-t5", tiny_model("chronos-t5"))
    line = [Candidate(8, 8, 40, None, i / 10, Costs(macs=100 - i)) for i in range(8)]
    fast = {3, 5, 6, 7}
    chosen = choose_folded(
        line,
        Budget(measure="latency", ratio=0.5),
        costs,
        measure_latency=lambda one: 0.4 if round(10 * one.loss) in fast else 0.6,
    )
    assert chosen == line[3]


@pytest.mark.parametrize("kind", ["folded", "factored"])
def test_when_no_measurement_fits(models: dict[str, Any], kind: str) -> None:
    costs = cost_model_of("chronos-t5", models["chronos-t5"])
    choose, _ = chooser(kind, sensitivity_of("chronos-t5", models["chronos-t5"]), costs)
    with pytest.raises(PlanError, match=r"latency=0\.1: .* 0\.\d+ of"):
        choose(
            Budget(measure="latency", ratio=0.1),
            measure_latency=lambda one: 0.2 + one.costs.macs / 1e12,
        )
    with pytest.raises(PlanError, match=r"wql=1%: .* 1\.02\d* of"):
        choose(Budget(measure="wql", percent=1), measure_wql=lambda one: 1.02 + one.loss / 1e6)
    for budget in (Budget(measure="latency", ratio=0.1), Budget(measure="wql", percent=1)):
        with pytest.raises(UsageError, match=f"give measure_{budget.measure}"):
            choose(budget)
    nothing = Sensitivity(family="chronos-t5", base_loss=1, parts=())
    with pytest.raises(PlanError, match="no smaller size to try"):
        choose_factored(
            nothing, costs, Budget(measure="wql", percent=1), measure_wql=lambda one: 1.0
        )


# --------------------------------------------------------------------------------------------------
# Latency of a shape
# --------------------------------------------------------------------------------------------------


def test_timed_model_has_the_shape_of_the_candidate(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    few = WORKLOAD.model_copy(update={"num_samples": 2, "horizon": 3})
    costs = CostModel(loaded.family, loaded.model, few, bytes_per_number=4)
    sensitivity = sensitivity_of(loaded.family, loaded.model)
    candidates = folded_candidates(sensitivity, costs, depth=True)
    factored = choose_factored(sensitivity, costs, Budget(measure="parameters", ratio=0.75))
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    random_state = torch.get_rng_state()
    timed = []

    def watched(pipelines: Any, workload: Workload, **options: Any) -> Any:
        timed.append(pipelines["candidate"])
        return bench(pipelines, workload, **options)

    monkeypatch.setattr(candidate_latency, "bench", watched)
    for candidate in (candidates[-1], factored):
        assert latency_of(loaded, candidate, few, repeats=1) > 0
        assert parameter_count(timed[-1].inner_model) == candidate.costs.parameters
        assert count_macs(timed[-1], few) == candidate.costs.macs
    assert isinstance(factored.qk, dict)
    after = loaded.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random_state, torch.get_rng_state())
