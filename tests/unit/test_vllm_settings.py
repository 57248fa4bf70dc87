"""What an operator sets for the vLLM connectors."""

import pytest

from tiercache.errors import ConfigError
from tiercache.state.seats import RanksOf
from tiercache_vllm.settings import settings_of, tagged


def test_a_socket_is_enough() -> None:
    settings = settings_of({"socket": "/run/s"})
    assert (settings.reads, settings.writes, settings.reshard) == (True, True, True)
    assert settings.device_checkpoint_bytes == 0, "nothing lossy unless asked for"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "`socket`"),
        ({"socket": "run/s"}, "absolute path"),
        ({"socket": "/s", "sockt": 1}, "sockt"),
        ({"socket": "/s", "deadline_s": "soon"}, "deadline_s"),
        ({"socket": "/s", "deadline_s": 0.0}, "`deadline_s` must be above 0"),
        ({"socket": "/s", "load_s": 1e9}, "`load_s` must be above 0"),
        ({"socket": "/s", "source_wait_s": -0.1}, "`source_wait_s` must be 0 to 60 seconds"),
        ({"socket": "/s", "source_wait_s": 61}, "`source_wait_s`"),
        ({"socket": "/s", "source_wait_s": float("nan")}, "`source_wait_s`"),
        ({"socket": "/s", "node": "a b"}, "`node` must be a node's name"),
        ({"socket": "/s", "node": "x" * 65}, "`node`"),
        ({"socket": "/s", "seats": {"a b": [0, 1]}}, "`seats` go by the names of nodes"),
        ({"socket": "/s", "seats": {"a": [0]}}, "seats"),
        ({"socket": "/s", "loaders": 0}, "`loaders` must be at least 1"),
        ({"socket": "/s", "device_checkpoint_bytes": -1}, "`device_checkpoint_bytes`"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        settings_of(table)
    assert "\n" not in str(caught.value)


def test_seats_as_each_rank_sees_them() -> None:
    settings = settings_of({"socket": "/s", "seats": {"a": [0, 2], "b": [2, 4]}})
    assert settings.seats_of(4, 1) == (RanksOf("", 0, 2), RanksOf("b", 2, 4))
    assert settings.seats_of(4, 2) == (RanksOf("a", 0, 2), RanksOf("", 2, 4))
    with pytest.raises(ConfigError, match="the seats are of 4 ranks; there are 8"):
        settings.seats_of(8, 0)
    assert settings_of({"socket": "/s"}).seats_of(8, 3) == ()


def test_scopes_are_told_apart() -> None:
    tags = {tagged(b"d", *scope) for scope in (("", ""), ("a", ""), ("", "a"), ("a", "a"))}
    assert len(tags) == 4
