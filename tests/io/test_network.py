"""Addresses of the Hub in messages: without the password that they may hold."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from tscompress.errors import HubError, UsageError
from tscompress.io.hub_errors import Push, push_errors_in_words
from tscompress.io.network import check_endpoint, one_line


def test_an_address_that_cannot_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in ("me:secret@hub.invalid", "http://me:secret@hub.invalid:port"):
        monkeypatch.setenv("HF_ENDPOINT", given)
        with pytest.raises(UsageError, match="HF_ENDPOINT") as refused:
            check_endpoint()
        assert "secret" not in str(refused.value)


def test_the_page_of_pull_requests_is_named_without_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://me:secret@hub.invalid:8443/prefix")
    with (
        pytest.raises(HubError, match=r"https://hub\.invalid:8443/prefix/me/model") as refused,
        push_errors_in_words("the commit", Push("me/model", True, 1.0)),
    ):
        raise TimeoutError
    assert "secret" not in str(refused.value)


def test_a_line_has_no_passwords_of_addresses() -> None:
    line = one_line("413 for url 'https://me:sec@ret@hub.invalid/api', \n mail a@b.invalid")
    assert line == "413 for url 'https://hub.invalid/api', mail a@b.invalid"
