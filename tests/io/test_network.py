"""Addresses of the Hub in messages: without the password that they may hold."""

from __future__ import annotations

from contextlib import ExitStack

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tscompress.errors import HubError, UsageError
from tscompress.io.hub_errors import Push, push_errors_in_words
from tscompress.io.network import bounded_requests, check_endpoint, one_line


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


@pytest.mark.skipif(not hasattr(_http, "set_client_factory"), reason="before version 1: requests")
def test_the_last_of_several_threads_removes_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves sooner takes no other's client away, and none keeps them for ever."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    own = _http._GLOBAL_CLIENT_FACTORY
    first, second = ExitStack(), ExitStack()
    first.enter_context(bounded_requests(1))
    bounded = _http._GLOBAL_CLIENT_FACTORY
    assert bounded is not own
    client = huggingface_hub.get_session()
    second.enter_context(bounded_requests(1))
    first.close()
    assert _http._GLOBAL_CLIENT_FACTORY is bounded
    assert huggingface_hub.get_session() is client
    second.close()
    assert _http._GLOBAL_CLIENT_FACTORY is own
