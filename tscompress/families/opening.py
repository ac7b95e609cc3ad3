"""How a stock checkpoint is opened, under whatever name its config has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronos import BaseChronosPipeline

#: What chronos reads. A config converted by transformers#47693 has another type and no pipeline
#: class; the model there reads these names as well.
CHRONOS2_NAMES = {
    "model_type": "t5",
    "chronos_pipeline_class": "Chronos2Pipeline",
    "architectures": ["Chronos2Model"],
}


def is_converted(config: Mapping[str, Any]) -> bool:
    """Whether a config is of transformers' own Chronos-2, not of chronos-forecasting's."""
    if config.get("chronos_pipeline_class") not in (None, "Chronos2Pipeline"):
        return False
    named = config.get("model_type") == "chronos2"
    alone = config.get("chronos_pipeline_class") is None and "chronos_config" in config
    return named or (alone and config.get("architectures") == CHRONOS2_NAMES["architectures"])


class Openable:
    """A family whose stock checkpoints chronos opens by themselves."""

    def stock_settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A ``config.json`` as chronos reads it, for models in memory and checkpoints to come."""
        return config

    def open_stock(
        self, directory: Path, config: Mapping[str, Any], **options: Any
    ) -> BaseChronosPipeline:
        """The stock pipeline of a checkpoint.

        Parameters
        ----------
        config
            Its ``config.json``, as it is on disk.
        options
            Of ``from_pretrained``.
        """
        return BaseChronosPipeline.from_pretrained(directory, **options)
