"""Pages and states in and out of a node, by page hashes, over a scripted node."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiercache.client import Client, copy_into
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import SHORT
from tiercache.wire import messages as wire
from tiercache.wire import surveying
from tiercache_sglang import store as store_module
from tiercache_sglang.figures import Figures
from tiercache_sglang.geometry import Piece, Pools, layout_of
from tiercache_sglang.identity import namespace_of
from tiercache_sglang.int8 import CODEC, Int8States
from tiercache_sglang.restorable import NO_HITS
from tiercache_sglang.store import Pace, Store

PAGE = 4
KEYS = [hashlib.sha256(bytes([at])).hexdigest() for at in range(8)]
SHAPE = (1, 1, 2, 4)
POOLS = Pools(
    PAGE,
    "page_first",
    True,
    (Piece("latent", "int8", (8,), ("latent",)),),
    (Piece("temporal", "float32", SHAPE, ("layer", "head", "value", "key")),),
    (Piece("conv0", "int8", (6,), ("axis0",)),),
)
HYBRID = layout_of(POOLS, 1)
DENSE = layout_of(Pools(PAGE, "page_first", True, POOLS.kv), 1)
MAMBA = {"mamba": 1}


def made(path: Path, layout: object = HYBRID, *, int8: bool = False, exact: bool = True) -> Store:
    assert isinstance(layout, type(HYBRID))
    namespace = namespace_of(layout, model="m", weights="w", tokenizer="t", facts=(), bigram=False)
    client = Client.attach(path, namespace, layout, options=SHORT)
    codec = Int8States(SHAPE, torch.float32) if int8 else None
    pace = Pace(0.0, 5.0, CODEC if codec else "native", codec, exact)
    return Store(client, layout, pace, Figures())


@pytest.fixture
def node(path: Path) -> Iterator[ScriptedNode]:
    with ScriptedNode(path, HYBRID) as scripted:
        yield scripted


@pytest.fixture
def store(node: ScriptedNode) -> Iterator[Store]:
    store = made(node.path)
    yield store
    store.close()


def page(value: int, nbytes: int = 32) -> bytearray:
    return bytearray([value]) * nbytes


def state(value: float) -> dict[str, tuple[memoryview, ...]]:
    temporal = torch.full(SHAPE, value, dtype=torch.float32).numpy().tobytes()
    conv = memoryview(page(int(value), 6))
    return {"recurrent": (memoryview(bytearray(temporal)),), "conv": (conv[:2], conv[2:])}


def save(store: Store, pages: int, *stops: int) -> None:
    """Save the first pages, and the states at the ends of some of them."""
    for stop in stops:
        assert store.save_states(KEYS[: stop - 1], [KEYS[stop - 1]], [state(stop)])
    sources = [[memoryview(page(at))] for at in range(pages)]
    assert store.save_pages([], KEYS[:pages], sources)
    store.client.flush()


def look_up(store: Store, keys: list[str]) -> list[int]:
    return store.look_up(keys, {"mamba": store.state_parts}, MAMBA).prefixes


def test_what_is_saved_is_found_and_read(store: Store) -> None:
    save(store, 4, 2, 4)
    assert look_up(store, KEYS) == [2, 4]
    assert look_up(store, KEYS[1:]) == [1, 3]  # From any page on.
    first, second = bytearray(32), bytearray(32)
    view = memoryview(second)
    targets = [[memoryview(first)], [view[:5], view[5:]]]
    assert store.read_pages(KEYS[2:4], targets) == [True, True]
    assert (first, second) == (page(2), page(3))
    target = state(0)
    assert store.read_states([KEYS[1]], [target]) == [True]
    assert [bytes(piece) for piece in target["conv"]] == [b"\2\2", b"\2\2\2\2"]
    assert torch.frombuffer(target["recurrent"][0], dtype=torch.float32).eq(2).all()
    counts = store.figures.counts()
    assert (counts["get_pages"], counts["states_stored"]) == (4, 2)


def test_offers_say_where_a_page_stands(node: ScriptedNode, store: Store) -> None:
    store.save_pages(KEYS[:3], KEYS[3:4], [[memoryview(page(1))]])
    store.save_states(KEYS[:3], KEYS[3:4], [state(1)])
    kv, states = node.wait(wire.Reserve, 2)
    assert [(o.start, o.end) for o in kv.offers] == [(12, 16)]
    assert [(o.start, o.end) for o in states.offers] == [(0, 16), (0, 16)]
    assert kv.offers[0].digest == bytes.fromhex(KEYS[3])


def test_a_look_up_does_not_say_where_pages_stand(node: ScriptedNode, store: Store) -> None:
    """SGLang 0.5.23 leaves out the last node before it: what comes before a save is right."""
    assert look_up(store, KEYS[2:]) == []
    assert store.save_states(KEYS[:3], [KEYS[3]], [state(1)])
    (saved,) = node.wait(wire.Reserve)
    assert {offer.end for offer in saved.offers} == {4 * PAGE}


def test_what_sglang_had_itself_is_told(node: ScriptedNode, store: Store) -> None:
    """It was of use, although nobody reads it from the node."""
    store.look_up(KEYS[3:], {}, {}, KEYS[:2])
    store.look_up(KEYS[3:], {}, {}, ["no digest"])
    first, second = node.wait(surveying.Survey, 2)
    assert (first.before, second.before) == (bytes.fromhex("".join(KEYS[:2])), b"")


def test_one_request_is_one_sight(node: ScriptedNode, store: Store) -> None:
    """What was looked up and not found is saved under the same name, the state first."""
    look_up(store, KEYS[:3])
    look_up(store, KEYS[:3])
    save(store, 4, 3)
    asked = {survey.request for survey in node.wait(surveying.Survey, 2)}
    assert {saved.request for saved in node.wait(wire.Reserve, 2)} == asked
    assert len(asked) == 1


def test_a_state_goes_where_its_page_is_known_to_stand(path: Path, node: ScriptedNode) -> None:
    """Without a host cache, SGLang names what comes before the node that ends with the state's page."""
    store = made(path, exact=False)
    assert not store.save_states([], [KEYS[3]], [state(1)])
    assert store.figures.counts()["no_position"] == 1
    assert store.save_pages(KEYS[:1], KEYS[1:4], [[memoryview(page(at))] for at in range(3)])
    assert store.save_states(KEYS[:1], [KEYS[3]], [state(1)])
    assert store.look_up(KEYS[2:], {}, {}).longest == 2
    assert store.save_states(KEYS[:2], [KEYS[6]], [state(1)])
    saved = [r.offers[0].end for r in node.wait(wire.Reserve, 3) if r.offers[0].part]
    assert saved == [4 * PAGE, 7 * PAGE]
    store.close()


def test_what_is_missing_is_said_for_each_page(store: Store) -> None:
    save(store, 2)
    targets = [[memoryview(bytearray(32))] for _ in range(3)]
    assert store.read_pages(KEYS[:3], targets) == [True, True, False]
    assert store.read_states([KEYS[0]], [state(0)]) == [False]


def test_a_size_that_does_not_fit_is_a_miss(store: Store) -> None:
    save(store, 1)
    assert store.read_pages(KEYS[:1], [[memoryview(bytearray(31))]]) == [False]
    assert store.read_pages(KEYS[:2], [[memoryview(bytearray(32))]]) == [False, False]
    assert store.figures.counts()["faults:wrong size"] == 1


def test_keys_that_are_no_digests(store: Store) -> None:
    assert store.look_up(["k"], {}, {}) is NO_HITS
    assert store.look_up([], {}, {}) is NO_HITS
    assert store.read_pages(["k"], [[memoryview(bytearray(32))]]) == [False]
    assert not store.save_pages([], ["k"], [[memoryview(page(1))]])


def test_long_paths_are_asked_in_parts(
    store: Store, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SURVEY_PAGES_MAX", 2)
    save(store, 5, 1, 3, 5)
    assert look_up(store, KEYS) == [1, 3, 5]
    asked = node.wait(surveying.Survey, 3)
    assert [len(one.chain) // 32 for one in asked] == [2, 2, 2]
    assert len({one.request for one in asked}) == 3


# --- what is kept until it is read


def released(node: ScriptedNode, store: Store) -> list[str]:
    store.client.flush()
    return [name for notice in node.wait(wire.Release, 0) for name in notice.requests]


def test_what_was_found_is_kept_until_its_state_is_read(node: ScriptedNode, store: Store) -> None:
    save(store, 4, 2, 4)
    look_up(store, KEYS)
    (survey,) = node.wait(surveying.Survey)
    store.read_pages(KEYS[:4], [[memoryview(bytearray(32))] for _ in range(4)])
    assert survey.request not in released(node, store)
    store.read_states([KEYS[3]], [state(0)])
    assert survey.request in released(node, store)


def test_without_states_the_last_page_ends_it(path: Path) -> None:
    with ScriptedNode(path, DENSE) as node:
        store = made(path, DENSE)
        assert store.save_pages([], KEYS[:2], [[memoryview(page(at))] for at in range(2)])
        store.client.flush()
        assert store.look_up(KEYS, {}, {}).prefixes == [1, 2]
        (survey,) = node.wait(surveying.Survey)
        store.read_pages(KEYS[:1], [[memoryview(bytearray(32))]])
        assert survey.request not in released(node, store)
        store.read_pages(KEYS[1:2], [[memoryview(bytearray(32))]])
        assert survey.request in released(node, store)
        store.close()


def test_a_miss_keeps_nothing(node: ScriptedNode, store: Store) -> None:
    save(store, 2)
    assert look_up(store, KEYS) == []
    (survey,) = node.wait(surveying.Survey)
    assert survey.request in released(node, store)


def test_look_ups_that_are_never_read_have_a_limit(
    node: ScriptedNode, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SURVEYS_MAX", 1)
    save(store, 4, 2, 4)
    look_up(store, KEYS[:2])
    look_up(store, KEYS[:4])
    first, second = node.wait(surveying.Survey, 2)
    assert first.request in released(node, store)
    assert second.request not in released(node, store)
    store.clear()
    assert second.request in released(node, store)


# --- faults


def test_a_silent_node_is_a_miss_each_time(node: ScriptedNode, store: Store) -> None:
    save(store, 4, 4)
    node.freeze()
    assert store.look_up(KEYS, {}, {}) is NO_HITS
    target = [[memoryview(bytearray(32))]]
    assert store.read_pages(KEYS[:1], target) == [False]
    assert not store.save_pages([], KEYS[:1], [[memoryview(page(9))]])
    assert store.clear().reason
    counts = store.figures.counts()
    assert counts["faults:deadline"] >= 1
    assert counts["faults:unavailable"] >= 1
    node.thaw()


def test_a_copy_under_a_lost_lease_is_not_believed(
    node: ScriptedNode, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 2)

    def copy(into: memoryview, source: memoryview) -> None:
        copy_into(into, source)
        node.drop_clients()
        node.wait_until(lambda: not store.client.boot)

    monkeypatch.setattr(store_module, "copy_into", copy)
    assert store.read_pages(KEYS[:1], [[memoryview(bytearray(32))]]) == [False]
    assert store.figures.counts()["faults:lease lost"] == 1


@pytest.mark.parametrize(
    ("outcome", "counts"), [("full", False), ("busy", True), ("not_admitted", False)]
)
def test_what_is_declined(node: ScriptedNode, store: Store, outcome: str, *, counts: bool) -> None:
    """What somebody else writes just now will be there."""
    node.script = lambda request: (
        wire.Reserved(request.call, [wire.Grant(outcome)] * len(request.offers))
        if isinstance(request, wire.Reserve)
        else None
    )
    assert store.save_pages([], KEYS[:1], [[memoryview(page(1))]]) is counts
    assert store.figures.counts()[f"faults:{outcome}"] == 1


# --- fewer bytes


def test_states_may_be_kept_in_another_form(path: Path, node: ScriptedNode) -> None:
    store = made(path, int8=True)
    save(store, 2, 2)
    (reserve,) = [r for r in node.wait(wire.Reserve, 2) if len(r.offers) == 2 and r.offers[0].part]
    assert [(o.codec, o.requantised) for o in reserve.offers] == [(CODEC, 1), ("native", 0)]
    assert reserve.offers[0].nbytes == 8 + 4 * 4
    target = state(0)
    assert store.read_states([KEYS[1]], [target]) == [True]
    back = torch.frombuffer(target["recurrent"][0], dtype=torch.float32)
    assert torch.allclose(back, torch.full((8,), 2.0), atol=0.02)
    store.close()


def test_native_states_are_taken_where_there_are_some(path: Path, node: ScriptedNode) -> None:
    plain = made(path)
    save(plain, 2, 2)
    store = made(path, int8=True)
    target = state(0)
    assert store.read_states([KEYS[1]], [target]) == [True]
    assert torch.frombuffer(target["recurrent"][0], dtype=torch.float32).eq(2).all()
    plain.close()
    store.close()
