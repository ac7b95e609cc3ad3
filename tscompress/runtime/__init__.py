"""Forecasts of an exported model, with numpy and onnxruntime alone: torch is not imported.

::

    forecaster = tscompress.runtime.load("exported")
    quantiles, median = forecaster.predict_quantiles([series], 24, [0.1, 0.5, 0.9])
"""

from tscompress.runtime.forecaster import Forecaster
from tscompress.runtime.load import load

__all__ = ["Forecaster", "load"]
