"""`members` and `clear --cluster` against a scripted node."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.runtime.cluster.documents import Cleared, Members, Row, Shared
from tiercache.state import Label
from tiercache.testing.answering import AnsweringNode
from tiercache.wire import clustering
from tiercache.wire import messages as wire

SPACE = "ab" * 32
HOSTILE = "n\x1b]0;own\x07"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[AnsweringNode]:
    made = AnsweringNode(tmp_path / "node.sock")
    yield made
    made.close()


def run(node: AnsweringNode, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--socket", str(node.path)])


def knows(node: AnsweringNode, *digests: str) -> None:
    """Have the node hold these namespaces."""
    labels = [Label(bytes.fromhex(digest), "m", "w", "t", "", "-") for digest in digests]
    facts: dict[str, object] = {
        "version": "1", "protocol": 1, "boot": "b", "pid": 1, "socket": "s", "uptime_s": 1.0,
        "connections": 1, "arena_bytes": 1, "arena_prefaulted_bytes": 1, "nvme": "off",
    }  # fmt: skip
    stats: dict[str, object] = {
        "node": facts,
        "counters": {},
        "gauges": {},
        "namespaces": [[msgspec.to_builtins(label), {"objects": 1}] for label in labels],
    }
    node.reports(wire.Stats, stats)


def report(node: AnsweringNode, kind: type, body: Cleared | Members | Shared) -> None:
    node.reports(kind, msgspec.to_builtins(body))


def test_one_namespace_is_cleared_everywhere(node: AnsweringNode) -> None:
    knows(node, SPACE, "cd" * 32)
    report(node, clustering.ClearAll, Cleared(5, (), 10))
    result = run(node, "clear", "AB", "--yes", "--cluster", "--deadline", "7")
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    assert SPACE in result.stdout
    (asked,) = node.asked(clustering.ClearAll)
    assert isinstance(asked, clustering.ClearAll)
    assert (asked.namespace, asked.wait_ms) == (SPACE, 6_000)


def test_a_whole_digest_need_not_be_known_here(node: AnsweringNode) -> None:
    report(node, clustering.ClearAll, Cleared(5, (), 10))
    result = run(node, "clear", SPACE, "--yes", "--cluster", "--json")
    assert json.loads(result.stdout) == {"flush": 5, "behind": [], "ttl_s": 10}
    assert node.asked(wire.Stats) == []


@pytest.mark.parametrize(
    ("digits", "what"), [("", "no name"), ("ee", "0 namesp"), ("ab", "2 namesp")]
)
def test_no_more_and_no_less_than_one(node: AnsweringNode, digits: str, what: str) -> None:
    knows(node, SPACE, "ab" + "cd" * 31)
    result = run(node, "clear", *([digits] if digits else []), "--yes", "--cluster")
    assert result.exit_code == Exit.USAGE
    assert what in result.stderr
    assert node.asked(clustering.ClearAll) == []


def test_it_must_be_meant(node: AnsweringNode) -> None:
    assert run(node, "clear", SPACE, "--cluster").exit_code == Exit.USAGE
    assert node.asked(clustering.ClearAll) == []


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_who_is_behind_is_named(node: AnsweringNode, words: tuple[str, ...]) -> None:
    report(node, clustering.ClearAll, Cleared(5, ("b", HOSTILE), 10))
    result = run(node, "clear", SPACE, "--yes", "--cluster", *words)
    assert result.exit_code == Exit.UNREACHABLE
    assert "not done yet by b, n" in result.stderr
    assert "\x1b" not in result.stderr
    assert bool(result.stdout) is bool(words)


def test_a_node_without_a_cluster_refuses(node: AnsweringNode) -> None:
    node.fails(clustering.Members, "refused", "this node is in no cluster")
    result = run(node, "members")
    assert result.exit_code == Exit.REFUSED
    assert "in no cluster" in result.stderr


@pytest.mark.parametrize(
    ("words", "asked", "says"),
    [
        (("set", "-", "--host", "0.5", "--cluster"), (0.5, None), "- may take 0.5 of memory"),
        (("set", "-", "--host", "1", "--nvme", "0", "--cluster"), (1.0, 0.0),
         "- may take 1 of memory and 0 of the disk"),
        (("unset", "-"), (None, None), "- may take what its own settings say"),
    ],
)  # fmt: skip
def test_a_share_is_set_on_every_node(
    node: AnsweringNode, words: tuple[str, ...], asked: tuple[float | None, ...], says: str
) -> None:
    report(node, clustering.ShareAll, Shared("-", asked[0], asked[1]))
    result = run(node, "quota", *words)
    assert result.exit_code == Exit.OK
    assert f"On every node {says}." in result.stdout
    (message,) = node.asked(clustering.ShareAll)
    assert isinstance(message, clustering.ShareAll)
    assert (message.tenant, message.host, message.nvme) == ("-", *asked)
    told = json.loads(run(node, "quota", *words, "--json").stdout)
    assert told == {"tenant": "-", "host": asked[0], "nvme": asked[1]}


def members(standing_s: float, behind: dict[str, tuple[str, ...]]) -> Members:
    rows = [
        Row("a", "b1", "10.0.0.1:7411", (1, 1), 1 << 30, 0, 12, "self"),
        Row(HOSTILE, "b2", "10.0.0.2:7411", (1, 2), 1 << 30, 1 << 40, 1_234, "sick"),
    ]
    return Members("prod", "a", standing_s, rows, behind)


def test_members_are_shown(node: AnsweringNode) -> None:
    report(node, clustering.Members, members(8.0, {}))
    result = run(node, "members")
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["node", "a", "n\\x1b]0;own\\x07"]
    assert "1,234" in lines[2]
    assert "1-2" in lines[2]
    assert json.loads(run(node, "members", "--json").stdout)["standing_s"] == 8


def test_what_is_amiss_is_said(node: AnsweringNode) -> None:
    report(node, clustering.Members, members(0.0, {SPACE: ("a", "b")}))
    result = run(node, "members")
    assert result.exit_code == Exit.OK
    assert "abababababab is not done by a, b" in result.stdout
    assert "isolated" in result.stderr
