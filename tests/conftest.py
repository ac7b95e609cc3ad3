"""Where the fixtures are: not here, as the process that hands tests to workers needs none."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures in processes that run tests, not in one that hands tests to workers.

    They import torch and transformers, and workers start when the process above them is ready.
    """
    worker = hasattr(config, "workerinput")
    distributed = config.getoption("dist", "no") != "no" and config.getoption("tx", None)
    if worker or not distributed or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("shared_fixtures")
