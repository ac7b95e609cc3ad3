"""Where the fixtures are: not here, as the process that hands tests to workers needs none."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures in processes that run tests, not in one that hands tests to workers.

    They import torch and transformers, and workers start when the process above them is ready.
    """
    hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out_tests:
        config.pluginmanager.import_plugin("shared_fixtures")
