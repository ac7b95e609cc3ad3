"""Which families a test of the fixture ``checkpoint`` takes, where not all three tell more."""

from __future__ import annotations

import pytest

#: Chronos-T5 and Chronos-Bolt have the same layers. Of what these decide Bolt stands for both, as
#: it forecasts without sampling, in a third of the time.
two_stacks = pytest.mark.parametrize("checkpoint", ["chronos-bolt", "chronos-2"], indirect=True)
#: Of what does not depend on the family.
any_family = pytest.mark.parametrize("checkpoint", ["chronos-bolt"], indirect=True)
