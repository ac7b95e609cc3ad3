"""Make pretrained time-series foundation models smaller and faster, and measure the cost.

The namespace is lazy: ``import tscompress`` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tscompress._version import __version__

if TYPE_CHECKING:
    from tscompress.api import compress, recover
    from tscompress.benchmark.bench import bench
    from tscompress.benchmark.results import BenchResult
    from tscompress.benchmark.workload import Workload
    from tscompress.budget.plan_within_budget import sensitivities
    from tscompress.budget.sensitivity import Sensitivity
    from tscompress.checkpoints.load import LoadedModel, load
    from tscompress.compression.calibration import CalibrationConfig
    from tscompress.compression.fold_config import FoldConfig
    from tscompress.data.reading.format import GivenSeries
    from tscompress.data.series import read_series
    from tscompress.errors import TscompressError
    from tscompress.evaluation.comparison import Comparison
    from tscompress.evaluation.fidelity import Fidelity
    from tscompress.evaluation.results import EvaluationResult, relative
    from tscompress.hub.card import write_card
    from tscompress.hub.card_scores import CardScores
    from tscompress.hub.push import PushResult, push
    from tscompress.layers.low_rank import LowRankLinear
    from tscompress.layers.shared_cross_attention import share_cross_attention
    from tscompress.plan.plan import Plan
    from tscompress.plan.schedules import (
        Budget,
        BudgetSchedule,
        EnergySchedule,
        EpsilonSchedule,
        FitSchedule,
        PlannedSchedule,
        PowerLawSchedule,
        RankSchedule,
    )
    from tscompress.probing.measure import probe
    from tscompress.probing.results import ProbeComparison, ProbeResult
    from tscompress.probing.tasks import ProbeTask
    from tscompress.profiling.compare_profiles import ProfileComparison, compare_profiles
    from tscompress.profiling.measure import profile
    from tscompress.profiling.rank_profile import RankProfile
    from tscompress.training.pretrain_recipe import PretrainRecipe
    from tscompress.training.pretraining import pretrain
    from tscompress.training.recovery_config import RecoveryConfig
    from tscompress.training.recovery_state import RecoveryResult
    from tscompress.workflows.evaluate import compare, evaluate
    from tscompress.workflows.export import ExportResult, export
    from tscompress.workflows.recipe import Recipe, load_pretrain_recipe, load_recipe
    from tscompress.workflows.run import RunResult, run
    from tscompress.workflows.save import CompressedModel, save

_HOME = {
    "RunResult": "workflows.run",
    "load_pretrain_recipe": "workflows.recipe",
    "compress": "api",
    "recover": "api",
    "run": "workflows.run",
    "CalibrationConfig": "compression.calibration",
    "CardScores": "hub.card_scores",
    "write_card": "hub.card",
    "GivenSeries": "data.reading.format",
    "read_series": "data.series",
    "TscompressError": "errors",
    "EvaluationResult": "evaluation.results",
    "evaluate": "workflows.evaluate",
    "ExportResult": "workflows.export",
    "export": "workflows.export",
    "relative": "evaluation.results",
    "Fidelity": "evaluation.fidelity",
    "FoldConfig": "compression.fold_config",
    "PushResult": "hub.push",
    "push": "hub.push",
    "BenchResult": "benchmark.results",
    "Workload": "benchmark.workload",
    "bench": "benchmark.bench",
    "LoadedModel": "checkpoints.load",
    "load": "checkpoints.load",
    "LowRankLinear": "layers.low_rank",
    "Plan": "plan.plan",
    "Budget": "plan.schedules",
    "BudgetSchedule": "plan.schedules",
    "EnergySchedule": "plan.schedules",
    "EpsilonSchedule": "plan.schedules",
    "FitSchedule": "plan.schedules",
    "PlannedSchedule": "plan.schedules",
    "PowerLawSchedule": "plan.schedules",
    "RankSchedule": "plan.schedules",
    "PretrainRecipe": "training.pretrain_recipe",
    "pretrain": "training.pretraining",
    "probe": "probing.measure",
    "ProbeComparison": "probing.results",
    "ProbeResult": "probing.results",
    "ProbeTask": "probing.tasks",
    "ProfileComparison": "profiling.compare_profiles",
    "compare_profiles": "profiling.compare_profiles",
    "RankProfile": "profiling.rank_profile",
    "profile": "profiling.measure",
    "Recipe": "workflows.recipe",
    "load_recipe": "workflows.recipe",
    "RecoveryResult": "training.recovery_state",
    "RecoveryConfig": "training.recovery_config",
    "Sensitivity": "budget.sensitivity",
    "CompressedModel": "workflows.save",
    "save": "workflows.save",
    "share_cross_attention": "layers.shared_cross_attention",
    "sensitivities": "budget.plan_within_budget",
    "Comparison": "evaluation.comparison",
    "compare": "workflows.evaluate",
}

__all__ = [
    "BenchResult",
    "Budget",
    "BudgetSchedule",
    "CalibrationConfig",
    "CardScores",
    "Comparison",
    "CompressedModel",
    "EnergySchedule",
    "EpsilonSchedule",
    "EvaluationResult",
    "ExportResult",
    "Fidelity",
    "FitSchedule",
    "FoldConfig",
    "GivenSeries",
    "LoadedModel",
    "LowRankLinear",
    "Plan",
    "PlannedSchedule",
    "PowerLawSchedule",
    "PretrainRecipe",
    "ProbeComparison",
    "ProbeResult",
    "ProbeTask",
    "ProfileComparison",
    "PushResult",
    "RankProfile",
    "RankSchedule",
    "Recipe",
    "RecoveryConfig",
    "RecoveryResult",
    "RunResult",
    "Sensitivity",
    "TscompressError",
    "Workload",
    "__version__",
    "bench",
    "compare",
    "compare_profiles",
    "compress",
    "evaluate",
    "export",
    "load",
    "load_pretrain_recipe",
    "load_recipe",
    "pretrain",
    "probe",
    "profile",
    "push",
    "read_series",
    "recover",
    "relative",
    "run",
    "save",
    "sensitivities",
    "share_cross_attention",
    "write_card",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tscompress' has no attribute {name!r}")
    return getattr(import_module(f"tscompress.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
