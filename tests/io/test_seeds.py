"""Seeds: what they draw, and what they leave as it was."""

from __future__ import annotations

import pytest
import torch

from tscompress.io.seeds import kept_random_state, seed_, seeded


def test_a_seed_draws_what_torch_draws_and_the_state_comes_back() -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        wanted = torch.rand(3)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with seeded(5):
            assert torch.equal(torch.rand(3), wanted)
        assert torch.equal(torch.get_rng_state(), before)
        with kept_random_state():
            seed_(5, torch.device("cpu"))
            assert torch.equal(torch.rand(3), wanted)
        assert torch.equal(torch.get_rng_state(), before)


def test_no_other_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` seeds all, and nobody would restore them."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("every device was seeded"))
    with seeded(5):
        torch.rand(1)
