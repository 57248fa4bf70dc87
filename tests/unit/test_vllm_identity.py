"""What may be cached at all, and what it is called."""

import os
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache_vllm.identity import (
    SALT_BYTES_MAX,
    Adapter,
    Adapters,
    Feature,
    arithmetic_of,
    extras_of,
    revision_in,
    salt_of,
    tokenizer_of,
    weights_of,
)


def test_an_input_without_an_identity_is_not_cached() -> None:
    assert extras_of([Feature("image", "a", 3), Feature("image", None, 9)]) is None
    assert extras_of([Feature("image", "", 3)]) is None
    assert extras_of([]) == {}


def test_inputs_are_told_apart_by_content_and_place() -> None:
    seen = [
        extras_of(features)
        for features in (
            [Feature("image", "a", 3)],
            [Feature("image", "b", 3)],
            [Feature("image", "a", 4)],
            [Feature("video", "a", 3)],
            [Feature("image", "a", 3), Feature("audio", "a", 3)],
        )
    ]
    assert len({str(extras) for extras in seen}) == len(seen)
    both = [Feature("image", "a", 3), Feature("audio", "a", 3)]
    assert extras_of(both) == extras_of(both[::-1])


def test_a_new_epoch_is_another_salt() -> None:
    assert salt_of("tenant", "") == "tenant"
    salts = {
        salt_of("tenant", ""),
        salt_of("tenant", "1"),
        salt_of("tenant", "2"),
        salt_of("", "1"),
    }
    assert len(salts) == 4


def test_a_long_salt_is_hashed_and_no_text_is_refused() -> None:
    assert salt_of("x" * SALT_BYTES_MAX, "") == "x" * SALT_BYTES_MAX
    long = salt_of("x" * (SALT_BYTES_MAX + 1), "")
    assert len(long) == 64
    assert long != salt_of("x" * (SALT_BYTES_MAX + 2), "")
    with pytest.raises(ValueError, match="surrogates"):
        salt_of("\ud800", "")


def adapter(folder: Path, content: bytes = b"weights") -> Adapter:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return Adapter("french", 1, str(folder))


def test_an_adapter_is_its_name_and_content(tmp_path: Path) -> None:
    adapters = Adapters()
    first = adapters.content(adapter(tmp_path / "a"))
    copy = adapters.content(adapter(tmp_path / "b"))
    other = adapters.content(adapter(tmp_path / "c", b"others"))
    assert first is not None
    assert first == copy
    assert other not in (None, first)
    named = Adapter("german", 4, str(tmp_path / "a"))
    assert adapters.content(named) not in (None, first)


def test_an_adapter_that_changed_has_no_identity(tmp_path: Path) -> None:
    adapters = Adapters()
    one = adapter(tmp_path / "a")
    first = adapters.content(one)
    adapter(tmp_path / "a", b"changed")
    assert adapters.content(one) is None
    adapter(tmp_path / "a")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    assert adapters.content(one) is None, "whether the engine read it in between is not known"
    assert first is not None


def test_an_adapter_reloaded_in_place_is_read_again(tmp_path: Path) -> None:
    adapters = Adapters()
    one = adapter(tmp_path / "a")
    first = adapters.content(one)
    adapter(tmp_path / "a", b"changed")
    again = Adapter(one.name, one.number, one.path, inplace=True)
    second = adapters.content(again)
    assert second not in (None, first)
    assert adapters.content(one) == second


@pytest.mark.parametrize("make", [False, True])
def test_an_adapter_that_is_not_there_has_no_identity(tmp_path: Path, *, make: bool) -> None:
    if make:
        (tmp_path / "empty").mkdir()
    assert Adapters().content(Adapter("x", 1, str(tmp_path / "empty"))) is None


def model(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model-1.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "readme.md").write_text(str(folder))
    return str(folder)


def test_weights_are_their_content(tmp_path: Path) -> None:
    first, copy, other = (
        weights_of(
            model(tmp_path / name, content), stated="", load_format="auto", hash_bytes_max=99
        )
        for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    )
    assert first == copy != other


def test_weights_are_what_the_operator_says(tmp_path: Path) -> None:
    for load_format in ("auto", "dummy"):
        found = weights_of(
            model(tmp_path / "a"), stated="v7", load_format=load_format, hash_bytes_max=0
        )
        assert found == "v7"


def test_a_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = str(tmp_path / "models--x" / "snapshots" / commit)
    assert revision_in(folder) == commit
    assert revision_in(str(tmp_path / commit)) == ""
    assert revision_in(folder[:-1]) == ""
    found = weights_of(
        folder, stated="", load_format="auto", hash_bytes_max=0, revision=revision_in(folder)
    )
    assert found == commit


def test_weights_that_cannot_be_known_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    with pytest.raises(ConfigError, match="dummy weights have no identity"):
        weights_of(folder, stated="", load_format="dummy", hash_bytes_max=99)
    with pytest.raises(ConfigError, match="7 bytes in 1 files"):
        weights_of(folder, stated="", load_format="auto", hash_bytes_max=6)
    with pytest.raises(ConfigError, match="0 bytes in 0 files"):
        weights_of(str(tmp_path), stated="", load_format="auto", hash_bytes_max=99)


def test_a_tokenizer_is_its_files(tmp_path: Path) -> None:
    first = tokenizer_of(model(tmp_path / "a"), stated="")
    assert tokenizer_of(model(tmp_path / "b", b"x"), stated="") == first
    (tmp_path / "b" / "special_tokens_map.json").write_text("{}")
    assert tokenizer_of(str(tmp_path / "b"), stated="") != first
    assert tokenizer_of(str(tmp_path), stated="mine") == "mine"
    with pytest.raises(ConfigError, match="no tokenizer"):
        tokenizer_of(str(tmp_path), stated="")


def test_arithmetic_is_configuration_and_facts() -> None:
    config = {"hidden_size": 4, "_name_or_path": "/a", "transformers_version": "5"}
    base = arithmetic_of(config, ("dtype bf16",))
    assert base == arithmetic_of({**config, "_name_or_path": "/b"}, ("dtype bf16",))
    assert base != arithmetic_of({**config, "hidden_size": 5}, ("dtype bf16",))
    assert base != arithmetic_of(config, ("dtype fp32",))
