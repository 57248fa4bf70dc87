"""Pins, shares, ends and wishes on a real node, as clients and operators meet them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.cli.replies import ShareRow, ShareRows
from tiercache.client import Client, Hint, Options, Scope
from tiercache.state import Chain
from tiercache.state.keys import tenant_of
from tiercache.testing import toy
from tiercache.testing.nodes import NewNode, NodeProcess, eventually

MIB = 1 << 20
PROMPT_BYTES = 6 * 4096
"""What one prompt of the toy model takes: three blocks, a state of two pages, a convolution."""

POOL_PROMPTS = MIB // PROMPT_BYTES
A, B = "salt of a", "salt of b"


@pytest.fixture
def small(new_node: NewNode) -> NodeProcess:
    """A node with room for 42 prompts, and no shelter."""
    node = new_node(
        host={"bytes": MIB},
        protection={"shared_share_max": 0.0, "host_shares": {tenant_of(B): 0.25}},
    )
    node.start()
    return node


def run(node: NodeProcess, *args: str, stdin: str = "") -> Result:
    settings = str(node.folder / "settings.toml")
    return CliRunner().invoke(app, list(args), env={"TIERCACHE_CONFIG": settings}, input=stdin)


def told(node: NodeProcess, *args: str) -> dict[str, object]:
    result = run(node, *args, "--json")
    assert result.exit_code == Exit.OK, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def share(node: NodeProcess, salt: str) -> ShareRow:
    """Return what a tenant may take, and does."""
    result = run(node, "quota", "get", tenant_of(salt), "--json")
    assert result.exit_code == Exit.OK, result.stderr
    (row,) = msgspec.json.decode(result.stdout, type=ShareRows).tenants
    return row


@contextmanager
def attached(node: NodeProcess) -> Iterator[Client]:
    options = Options(name="engine-0", deadline_s=10.0, required=True)
    client = Client.attach(node.socket, toy.NAMESPACE, toy.LAYOUT, options=options)
    try:
        yield client
    finally:
        client.close()


def store(client: Client, number: int, scope: Scope = Scope()) -> dict[str, int]:  # noqa: B008
    """Save one prompt; return what was declined."""
    prompt = toy.chain(number)
    blobs = toy.state(prompt, toy.TOKENS, scope.salt)
    saved = client.save(f"save-{number}", prompt, blobs, scope=scope)
    assert client.flush().waiting == 0
    return dict(saved.declined)


def found(client: Client, number: int, salt: str = "") -> int:
    """Return how much of a prompt can be resumed from memory; its bytes are right."""
    longer = Chain([number * 7919 + position for position in range(toy.TOKENS + 1)], 16)
    with client.plan(f"look-{number}", longer, scope=Scope(salt=salt)) as plan:
        if not plan.ready:  # On disk by now, or nowhere.
            return 0
        assert list(toy.wrong(plan, longer, salt)) == []
        return plan.boundary


def test_a_pinned_prompt_survives_a_flood(small: NodeProcess) -> None:
    with attached(small) as client:
        store(client, 1)
        pinned = client.pin(toy.chain(1))
        assert (pinned.outcome, pinned.objects, pinned.nbytes) == ("pinned", 5, PROMPT_BYTES)
        for number in range(100, 100 + 2 * POOL_PROMPTS):
            assert store(client, number) == {}
        assert found(client, 1) == toy.TOKENS
        rows = told(small, "pins")["pins"]
        assert isinstance(rows, list)
        assert [(row["owner"], row["objects"]) for row in rows] == [("engine-0", 5)]
    assert eventually(lambda: told(small, "pins")["pins"] == [])


def test_an_operator_pins_and_unpins(small: NodeProcess) -> None:
    with attached(small) as client:
        store(client, 1)
        key = toy.NAMESPACE.digest.hex()[:12]
        done = run(small, "pin", key, "--age", "600", "--owner", "me")
        assert done.stdout == "Pin 1: 5 objects, 24.0KiB of memory, for 600 s.\n"
        shown = run(small, "pins").stdout
        assert "operator" in shown
        assert "Pinned: 24.0KiB of 204.8KiB that may be." in shown
        for number in range(100, 100 + 2 * POOL_PROMPTS):
            store(client, number)
        assert found(client, 1) == toy.TOKENS
        inspected = run(small, "inspect", f"{key}/{toy.chain(1).digest_at(16).hex()}").stdout
        assert "pinned" in inspected
        assert run(small, "unpin", "--owner", "me").exit_code == Exit.OK
        assert "No longer pinned" not in run(small, "unpin", "1").stdout
        assert told(small, "pins")["nbytes"] == 0


def test_what_cannot_be_pinned_is_said(small: NodeProcess) -> None:
    with attached(small) as client:
        for number in range(POOL_PROMPTS // 2):
            store(client, number)
        key = toy.NAMESPACE.digest.hex()[:12]
        result = run(small, "pin", key)
        assert result.exit_code == Exit.CONTENT
        assert "more than may be pinned" in result.stderr
        assert run(small, "pin", "nothing").exit_code == Exit.CONTENT
        late = run(small, "pin", key, "--age", "1e6")
        assert (late.exit_code, "3600 s at most" in late.stderr) == (Exit.USAGE, True)
        assert run(small, "pin", "").exit_code == Exit.USAGE
        assert run(small, "unpin").exit_code == Exit.USAGE
        assert run(small, "unpin", "77").exit_code == Exit.CONTENT
        assert run(small, "unpin", "77", "--json").exit_code == Exit.CONTENT
        assert client.pin(toy.chain(999)).outcome == "incomplete"
        assert store(client, 5000) == {}  # New objects can always be stored.


def test_a_flood_of_one_tenant_leaves_the_other_its_share(small: NodeProcess) -> None:
    a, b = Scope(salt=A), Scope(salt=B)
    with attached(small) as client:
        assert run(small, "quota", "set", tenant_of(A), "--host", "0.75").exit_code == Exit.OK
        kept = range(MIB // 4 // PROMPT_BYTES)
        for number in kept:
            store(client, number, b)
        evicted = 0
        for number in range(1000, 1000 + 10 * POOL_PROMPTS):
            prompt = toy.chain(number)
            saved = client.save("flood", prompt, toy.state(prompt, toy.TOKENS, A), scope=a)
            assert (saved.stored, saved.declined) == (5, {})
            evicted += saved.evicted
        assert [found(client, number, B) for number in kept] == [toy.TOKENS] * len(kept)
        assert evicted > 9 * POOL_PROMPTS * 5 - 5 * POOL_PROMPTS
        row = share(small, A)
        assert sum(row.outcomes.values()) == 50 * POOL_PROMPTS
        assert row.outcomes["rejected"] == 0
        assert row.taken["host"] <= row.allowed["host"] == 3 * MIB // 4
        shown = run(small, "quota", "get").stdout
        assert tenant_of(B) in shown
        assert "evicted_own" in shown
        # B's own flood costs B.
        for number in range(100, 200):
            store(client, number, b)
        row = share(small, B)
        assert row.taken["host"] <= row.allowed["host"] == MIB // 4
        assert row.outcomes["evicted_own"] > 0


def test_quotas_are_asked_for_in_words_that_can_be(small: NodeProcess) -> None:
    assert run(small, "quota", "set", A, "--host", "0.5").exit_code == Exit.USAGE
    assert run(small, "quota", "set", "-").exit_code == Exit.USAGE
    assert run(small, "quota", "set", "-", "--host", "1.5").exit_code == Exit.USAGE
    assert run(small, "quota", "get", "0123abcd").exit_code == Exit.CONTENT
    assert run(small, "quota", "label", stdin=f"{B}\n").stdout == f"{tenant_of(B)}\n"
    assert share(small, B).host == 0.25


def test_objects_end_and_wishes_are_kept(small: NodeProcess) -> None:
    with attached(small) as client:
        store(client, 1, Scope(ttl_s=0.5))
        store(client, 2, Scope(priority=-2, hint=Hint.END_OF_SESSION))
        secret = Scope(do_not_store=True)
        assert store(client, 3, secret) == {"do_not_store": 5}
        assert eventually(lambda: found(client, 1) == 0)
        counters = told(small, "stats")["counters"]
        assert isinstance(counters, dict)
        assert counters["expired"][""] == 5
        for number in range(100, 100 + POOL_PROMPTS):
            store(client, number)
        assert found(client, 2) == 0  # It went first.
        assert found(client, 100) == toy.TOKENS
        assert found(client, 3) == 0


def test_a_start_forgets_pins_and_what_was_set(small: NodeProcess) -> None:
    with attached(small) as client:
        store(client, 1)
        run(small, "pin", toy.NAMESPACE.digest.hex()[:12])
        run(small, "quota", "set", "-", "--host", "0.5")
    small.stop()
    small.start()
    assert told(small, "pins")["pins"] == []
    tenants = told(small, "quota", "get")["tenants"]
    assert isinstance(tenants, list)
    assert [row["tenant"] for row in tenants if row["host"] < 1] == [tenant_of(B)]
