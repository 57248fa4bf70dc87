"""What the SGLang adapter is told, and who an engine is: settings, layouts, namespaces, names."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tiercache.errors import ConfigError, LayoutError
from tiercache.state import Namespace, Shard
from tiercache_sglang.figures import Figures
from tiercache_sglang.geometry import Piece, Pools, layout_of
from tiercache_sglang.identity import engine_name, namespace_of
from tiercache_sglang.paths import PATHS_MAX, RETRY_S, Requests, path_of, scheme_of
from tiercache_sglang.settings import DEFAULT_SOCKET, Settings, parse
from tiercache_sglang.weights import SAMPLE_BYTES, tokenizer_of, weights_of

LATENT = Piece("latent", "bfloat16", (3, 80), ("layer", "latent"))
HEADS = Piece("keys", "bfloat16", (3, 2, 16), ("layer", "head", "dim"))
TEMPORAL = Piece("temporal", "float32", (5, 2, 16, 16), ("layer", "head", "value", "key"))
CONV = Piece("conv0", "bfloat16", (5, 96, 3), ("layer", "axis0", "axis1"))
MLA = Pools(64, "page_first", True, (LATENT,), (TEMPORAL,), (CONV,))
MHA = Pools(64, "page_first", False, (HEADS, replace(HEADS, name="values")))


# --- settings


def test_settings_come_from_a_table_of_their_own() -> None:
    extra = {"interface_v1": 1, "allocator": "shm", "backend_name": "b"}
    assert parse(extra) == Settings()
    assert parse(extra).socket == DEFAULT_SOCKET
    table = {"socket": "/s", "states": "int8", "deadline_s": 2, "write": False}
    settings = parse({**extra, "tiercache": table})
    assert (settings.socket, settings.states, settings.deadline_s) == ("/s", "int8", 2.0)
    assert not settings.write


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (None, "interface_v1"),
        ({"tiercache": {}}, "interface_v1"),
        ({"interface_v1": 1, "tiercache": {"sockte": "/s"}}, "sockte"),
        ({"interface_v1": 1, "tiercache": {"states": "int4"}}, "states"),
        ({"interface_v1": 1, "tiercache": {"deadline_s": 0}}, "deadline_s"),
        ({"interface_v1": 1, "tiercache": {"socket": ""}}, "socket"),
        ({"interface_v1": 1, "tiercache": []}, "object"),
        ({"interface_v1": 1, "tiercache": {"deadline_s": 4, "wait_s": 5}}, "together"),
    ],
    ids=["none", "flat pages", "unknown", "no codec", "no time", "no socket", "no table", "long"],
)
def test_wrong_settings_are_named(extra: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(extra)


# --- layouts


def test_a_page_is_one_object_and_ranks_split_what_is_theirs() -> None:
    layout = layout_of(MLA, 4)
    kv, recurrent, conv = layout.parts
    assert (kv.window, kv.block_tokens, kv.units) == (None, 64, 1)
    assert kv.nbytes(64, kv.whole) == 64 * 3 * 80 * 2
    assert [part.is_snapshot for part in (recurrent, conv)] == [True, True]
    assert recurrent.shards(4)[2] == Shard(2, 3)
    assert recurrent.nbytes(0, Shard(2, 3)) == 5 * 2 * 16 * 16 * 4
    assert conv.nbytes(0, Shard(0, 1)) == 5 * 96 * 3 * 2
    assert kv.shards(4) == (Shard(0, 1),) * 4


def test_heads_are_of_a_rank() -> None:
    (kv,) = layout_of(MHA, 2).parts
    assert kv.nbytes(64, kv.shards(2)[1]) == 64 * 2 * 3 * 2 * 16 * 2
    assert kv.units == 2
    assert layout_of(MHA, 1).parts[0].units == 1


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        (replace(MLA, order="page_first_kv_split"), "hicache-mem-layout"),
        (replace(MLA, kv=(replace(LATENT, dtype="uint4"),)), "uint4"),
    ],
    ids=["order", "dtype"],
)
def test_what_cannot_be_kept_is_refused(pools: Pools, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        layout_of(pools, 1)


# --- identity


def name(**changed: object) -> Namespace:
    given: dict[str, object] = {
        "model": "m", "weights": "w", "tokenizer": "t", "facts": ("tp 1",), "bigram": False,
    }  # fmt: skip
    pools = changed.pop("pools", MLA)
    assert isinstance(pools, Pools)
    return namespace_of(layout_of(pools, 1), **(given | changed))  # type: ignore[arg-type]


def test_whatever_changes_the_bytes_changes_the_namespace() -> None:
    others = [
        name(weights="w2"),
        name(tokenizer="t2"),
        name(model="m2"),
        name(facts=("tp 2",)),
        name(facts=("tp 1", "")),
        name(bigram=True),
        name(pools=replace(MLA, page_tokens=32)),
        name(pools=replace(MLA, kv=(replace(LATENT, dtype="float8_e4m3fn"),))),
        name(pools=replace(MLA, temporal=(replace(TEMPORAL, dtype="bfloat16"),))),
    ]
    assert len({each.digest for each in [*others, name(), name()]}) == len(others) + 1
    assert name().chain == scheme_of(64, bigram=False) == "sglang-page-sha256/64"


def test_ranks_of_one_launcher_share_a_name() -> None:
    assert engine_name("", 0) == engine_name("", 0)
    assert str(os.getppid()) in engine_name("", 0)
    assert len({engine_name("", 0), engine_name("", 1), engine_name("e", 0)}) == 3


# --- weights


def weights(folder: Path, content: bytes = b"w" * 99, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / file).write_bytes(content)
    return folder


def test_a_commit_of_the_hub_names_its_weights(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = weights(tmp_path / "snapshots" / commit)
    assert weights_of(str(folder)) == f"hub:{commit}"


def test_other_weights_are_told_by_their_files(tmp_path: Path) -> None:
    big = bytes(3 * SAMPLE_BYTES)
    tuned = bytearray(big)
    tuned[len(big) // 2] = 1
    folders = [weights(tmp_path / "a", big), weights(tmp_path / "b", bytes(tuned))]
    folders.append(weights(tmp_path / "c", big, "other.safetensors"))
    folders.append(weights(tmp_path / "d", big[:-1]))
    folders.append(weights(tmp_path / "e", big))
    (folders[-1] / "config.json").write_text('{"rope_theta": 1}')
    names = [weights_of(str(folder)) for folder in folders]
    assert len(set(names)) == len(folders)
    assert weights_of(str(weights(tmp_path / "f", big))) == names[0]


@pytest.mark.parametrize("there", [True, False])
def test_weights_that_are_nowhere_must_be_named(tmp_path: Path, *, there: bool) -> None:
    if there:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="name them"):
        weights_of(str(tmp_path if there else tmp_path / "org" / "model"))


def test_tokenizers_are_told_by_their_files(tmp_path: Path) -> None:
    assert tokenizer_of(str(tmp_path)) == "none"
    (tmp_path / "tokenizer.json").write_text("{}")
    one = tokenizer_of(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[]")
    assert "none" != one != tokenizer_of(str(tmp_path))


# --- paths and requests


def test_keys_are_digests_or_nothing() -> None:
    keys = ["ab" * 32, "CD" * 32]
    assert path_of(keys) == bytes.fromhex("".join(keys))
    assert path_of([]) == b""
    for wrong in (["ab"], ["ab" * 31 + "x", "ab" * 33], ["zz" * 32], ["a b" * 21 + "c"]):
        assert path_of(wrong) is None


def test_retries_of_a_look_up_are_one_request() -> None:
    requests = Requests()
    first = requests.asking(["j", "k"], 10.0)
    assert requests.asking(["j", "k"], 10.0 + RETRY_S / 2) == first
    assert requests.asking(["k"], 10.0 + RETRY_S) == first
    later = requests.asking(["j", "k"], 10.0 + 3 * RETRY_S)
    assert later != first
    assert requests.asking(["other"], 10.0) not in {first, later}


def test_a_save_is_of_the_request_that_missed_it() -> None:
    requests = Requests()
    requests.missed("one", ["c", "d"], 2)
    requests.missed("two", ["x"])
    assert requests.saving(["a", "b"], ["c"]) == "one"
    assert requests.saving(["a", "b"], ["c", "d", "e"]) == "one"
    assert requests.saving(["a", "b", "c", "d", "e"], ["f"]) == "one"  # Generated after it.
    assert requests.saving(["a"], ["x"]) == "two"
    unasked = requests.saving([], ["q"])
    requests.missed(unasked, ["q"])
    assert requests.saving(["q"], ["r"]) == unasked != requests.saving([], ["s"])


def test_where_pages_stand() -> None:
    requests = Requests()
    requests.missed("one", ["c", "d"], 2)
    requests.stands(7, ["h", "i"])
    requests.stands(8, ["i", "j"])
    requests.missed("two", ["y"])
    requests.missed("two", ["d"])  # It is gone from the node, and stands where it stood.
    assert [requests.position(key) for key in "cdhij"] == [2, 3, 7, 8, 9]
    assert requests.position("z") is None
    assert requests.position("y") is None, "missed, and nobody knows where it stands"


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache_sglang.paths.REQUESTS_MAX", 2)
    monkeypatch.setattr("tiercache_sglang.paths.PAGES_MAX", 2)
    requests = Requests()
    first = [requests.asking([key], 10.0) for key in "abc"]
    assert requests.asking(["a"], 10.0) == first[0]  # Forgotten, and so counted from the start.
    assert len(requests._last) == 2
    requests.missed("one", ["a", "b"], 0)
    requests.missed("two", ["c", "d", "e"], 2)
    assert requests.saving([], ["e"]).startswith("saved/")
    assert requests.saving([], ["b"]).startswith("saved/")
    assert len(requests._pages) == 2
    for number in range(PATHS_MAX + 1):
        requests.stands(number, [f"path {number}"])
    assert requests.position("path 0") is None
    assert requests.position("path 1") == 1


# --- figures


def test_figures_are_given_out_once() -> None:
    figures = Figures()
    figures.moved("get", 4, 4_000_000_000, 2.0)
    figures.moved("set", 0, 0, 0.0)
    figures.add("look_up")
    (transfer,) = figures.take("get")
    assert (transfer.pages, transfer.gb_per_s) == (4, 2.0)
    assert figures.take("get") == figures.take("set") == []
    counts = figures.counts()
    assert (counts["get_pages"], counts["look_up"], counts["set_pages"]) == (4, 1, 0)
