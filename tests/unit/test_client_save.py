"""What `save` offers, copies, commits, cancels, and refuses beforehand."""

from pathlib import Path
from time import monotonic

import pytest

from tiercache.client import Blob, Client, Options, Saved, Wanted, copy_into
from tiercache.errors import LayoutError
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Shard, Tensor
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    BLOCK,
    CHAIN,
    LAYOUT,
    NAMESPACE,
    TOKENS,
    blobs_for,
    content,
    store,
)
from tiercache.wire import messages as wire


def test_offers_say_what_records_say(node: ScriptedNode, client: Client) -> None:
    store(client, 10)
    (reserve,) = node.wait(wire.Reserve)
    assert [(o.part, o.start, o.end, o.nbytes, o.base) for o in reserve.offers] == [
        (0, 0, 4, 32, b""),
        (0, 4, 8, 32, b""),
        (0, 8, 10, 16, CHAIN.digests[2]),
        (1, 0, 10, 64, CHAIN.digests[2]),
    ]
    assert [o.digest for o in reserve.offers] == [CHAIN.digest_at(n) for n in (4, 8, 10, 10)]


def test_what_is_held_busy_or_declined_is_counted(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    blobs = blobs_for(8)
    assert client.save("again", CHAIN, blobs) == Saved(0, 3, {})
    outcomes = iter(["busy", "full", "too_large"])

    def decline(request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Reserve):
            return wire.Reserved(request.call, [wire.Grant(next(outcomes)) for _ in blobs])
        return None

    node.script = decline
    assert client.save("no", CHAIN, blobs) == Saved(0, 0, {"busy": 1, "full": 1, "too_large": 1})
    assert client.save("nothing", CHAIN, []) == Saved(0, 0, {})
    client.flush()
    assert len(node.wait(wire.Commit)) == 1


def test_batches(path: Path) -> None:
    with (
        ScriptedNode(path, LAYOUT, batch_max=2) as node,
        Client.attach(path, NAMESPACE, LAYOUT) as client,
    ):
        store(client, 11)
        assert [len(r.offers) for r in node.wait(wire.Reserve)] == [2, 2]
        assert [len(c.tickets) for c in node.wait(wire.Commit, 2)] == [2, 2]


def test_large_blobs_are_committed_one_by_one(path: Path) -> None:
    size = 5 << 20
    layout = Layout(
        (Part("kv", Kind.KV, None, 1, 1, (Tensor("k", "int8", (size,), ("d",)),)),), block_tokens=1
    )
    namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
    with (
        ScriptedNode(path, layout, segments=(2 * size,)) as node,
        Client.attach(path, namespace, layout) as client,
    ):
        chain = Chain([1, 2], 1)
        blobs = [Blob("kv", end, memoryview(bytes(size)), end - 1) for end in (1, 2)]
        assert client.save("w", chain, blobs).stored == 2
        assert [c.tickets for c in node.wait(wire.Commit, 2)] == [[1], [2]]


@pytest.mark.parametrize(
    ("blob", "error", "why"),
    [
        (Blob("no", 4, content(32, 0)), LayoutError, "no part 'no'"),
        (Blob("kv", 4, content(31, 0)), LayoutError, "31 bytes for tokens"),
        (Blob("kv", 4, content(32, 0), shard=Shard(0, 2)), LayoutError, "has units 0-1"),
        (Blob("kv", 8, content(32, 0)), ValueError, "start at 4, not 0"),
        (Blob("kv", 6, content(8, 0), 5), ValueError, "start at 4, not 5"),
        (Blob("state", 6, content(64, 0), 4), ValueError, "start at 0, not 4"),
        (Blob("state", 0, content(64, 0)), ValueError, "11 tokens, not 0"),
        (Blob("state", 12, content(64, 0)), ValueError, "11 tokens, not 12"),
        (Blob("state", 4, content(128, 0)[::2]), ValueError, "contiguous"),
        (Blob("state", 4, content(0, 0), codec="int8"), LayoutError, "0 bytes"),
    ],
)
def test_a_wrong_blob_is_refused_before_anything_is_sent(
    node: ScriptedNode, client: Client, blob: Blob, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        client.save("w", CHAIN, [*blobs_for(4), blob])
    client.flush()
    assert not node.wait(wire.Reserve, 0)


def test_other_misuse(node: ScriptedNode, client: Client) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        client.plan("", CHAIN)
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        client.plan("r", Chain(TOKENS, 8))
    with pytest.raises(ValueError, match="limit 12"):
        client.plan("r", CHAIN, limit=12)
    with pytest.raises(LayoutError, match="no part"):
        client.fetch("r", [Wanted("no", b"")])
    with pytest.raises(LayoutError, match="another layout"):
        Client.attach(node.path, NAMESPACE, Layout(LAYOUT.parts[:1], BLOCK))
    with pytest.raises(ValueError, match="rank 2"):
        Options(ranks=2, rank=2)
    with pytest.raises(ValueError, match="deadline_s"):
        Options(deadline_s=0)
    with pytest.raises(ValueError, match="do not fit"):
        copy_into(memoryview(bytearray(2)), memoryview(b"abc"))
    copy_into(memoryview(bytearray()), memoryview(b""))
    with (
        Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(write=False)) as reader,
        pytest.raises(ValueError, match="without `write`"),
    ):
        reader.save("r", CHAIN, [])


def test_an_interrupted_save_is_cancelled(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client._attached(monotonic() + 1).session

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.arena, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.save("w", CHAIN, blobs_for(8))
    assert node.wait(wire.Cancel) == [wire.Cancel([1, 2, 3])]
    assert node.shelf.pending == {}
    assert session.writers == 0


def test_reserved_too_late_is_cancelled(node: ScriptedNode, client: Client) -> None:
    node.mute = True
    assert client.save("w", CHAIN, blobs_for(8)) == Saved(0, 0, {"deadline": 3})
    node.speak()
    client.flush(wait_s=5)
    assert node.wait(wire.Cancel) == [wire.Cancel([1, 2, 3])]
    assert node.shelf.pending == {}
