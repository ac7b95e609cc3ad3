"""Covariates and groups: series that go with those that are forecast, and forecasts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tscompress.data.covariates import SeriesCovariates
from tscompress.data.evaluation_sets import SeriesArray
from tscompress.errors import UsageError

_ALONE = "forecasts each series alone; leave covariates, groups and cross-learning out."


class Covariates(NamedTuple):
    """Covariates of one series of T steps, for a forecast of H steps.

    Attributes
    ----------
    past
        ``[C, T]``, NaN where missing.
    future
        ``[K, H]``, K ≤ C: the first K covariates, known ahead. The others end with the series.
    """

    past: Tensor
    future: Tensor


class JointSeries(NamedTuple):
    """Series that are forecast together, as a table has them.

    Attributes
    ----------
    targets
        R series ``[T]``, NaN where missing.
    covariates
        With categories.
    """

    targets: Sequence[SeriesArray]
    covariates: SeriesCovariates


class Joint(NamedTuple):
    """The same as numbers, ``targets`` ``[R, T]``."""

    targets: Tensor
    covariates: Covariates

    @property
    def rows(self) -> int:
        """Rows of the model's input."""
        return len(self.targets) + len(self.covariates.past)


class JointForecasts:
    """Forecasts of series that see one another; of a family whose models see one series at a time,
    all of them are refused.
    """

    name: ClassVar[str]

    def encoded(self, tasks: Sequence[JointSeries], horizon: int) -> list[Joint]:
        """Tasks with numbers in the place of categories.

        Parameters
        ----------
        tasks
            With equal numbers of targets and equal names of covariates: what categories there are
            depends on all of them.

        Raises
        ------
        UsageError
            The family's models see one series at a time.
        """
        raise UsageError(f"{self.name} {_ALONE}")

    def predict_together(self, pipeline: Any, contexts: Tensor, horizon: int) -> Any:
        """One stock ``predict`` call on ``contexts`` ``[B, T]``, of which each sees the others.

        Raises
        ------
        UsageError
            As for :meth:`encoded`.
        """
        raise UsageError(f"{self.name} {_ALONE}")

    def joint_quantiles(
        self,
        pipeline: Any,
        tasks: Sequence[Joint],
        horizon: int,
        levels: Sequence[float],
        *,
        cross_learning: bool = False,
    ) -> Tensor:
        """Forecast quantiles ``[B, R, horizon, Q]`` of B tasks of R targets, as one batch.

        Parameters
        ----------
        cross_learning
            All series of the batch see one another, rather than those of a task.

        Raises
        ------
        UsageError
            As for :meth:`encoded`.
        """
        raise UsageError(f"{self.name} {_ALONE}")
