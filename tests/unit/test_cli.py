"""The commands against a scripted node: what they ask, what they show, how they end."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tiercache.cli import admin
from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.core import commands
from tiercache.errors import ProtocolError
from tiercache.state import Extent, Key, Kind, Label, Namespace, Part, Record, Tensor
from tiercache.state.layout import Layout
from tiercache.testing.answering import FRAME_BYTES_MAX, AnsweringNode
from tiercache.wire import messages as wire

LAYOUT = Layout((Part("kv", Kind.KV, None, 4, 1, (Tensor("k", "int8", (8,), ("d",)),)),), 4)
LABEL = Namespace.of(LAYOUT, model="kimi", weights="w1", tokenizer="t1").narrow(salt="s").label()
HOSTILE = "\x1b]0;own\x07[bold red]\u202e\x9b31m"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[AnsweringNode]:
    node = AnsweringNode(tmp_path / "node.sock")
    yield node
    node.close()


def run(node: AnsweringNode, *args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [*args, "--socket", str(node.path)], env=env)


def complaint(result: Result) -> str:
    """The one line that a failed command leaves on stderr."""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("tiercache: ")
    return result.stderr


def row(number: int, *, label: Label | None = LABEL, writer: str = "engine") -> commands.Row:
    key = Key(LABEL.digest, "kv", LAYOUT.part("kv").whole, "native", bytes([number]) * 32)
    record = Record(key, 4, 8, 4096, b"\x01" * 16, writer, 1_700_000_000.0, b"\x02" * 32)
    places = Extent(0, 4096, 8192), Extent(3, 0, 4096)
    return commands.Row(
        number, str(key), record, "kv", label, LAYOUT.fingerprint, *places, "sealed", 2, 5
    )


def counters(**changed: dict[str, int]) -> dict[str, dict[str, int]]:
    return {
        "lookups": {"hit_host": 2, "hit_nvme": 1, "miss": 4, "declined": 2, "aborted": 1},
        "misses": {"unknown_prefix": 3, "no_state": 1, "incomplete": 0, "beyond_limit": 0},
        "hit_tokens": {"host": 600, "nvme": 200},
        "lookup_tokens": {"": 1000},
        "evictions": {"host": 11, "nvme": 0},
        "damaged": {"host": 0, "nvme": 13},
        **changed,
    }


def statistics(counted: dict[str, dict[str, int]]) -> dict[str, object]:
    gauges = {
        "bytes": {"host": 4096.0, "nvme": 8192.0},
        "capacity_bytes": {"host": 8192.0, "nvme": 65536.0},
        "objects": {"host": 1.0, "nvme": 2.0},
        "free_largest_bytes": {"host": 2048.0},
        "leases": {"": 7.0},
        "leases_overdue": {"": 1.0},
        "quarantined_bytes": {"": 1024.0},
        "nvme_paused": {"": 1.0},
    }
    stats = commands.Stats(counted, gauges, [(LABEL, {"objects": 3, "host": 2048})])
    facts = {"version": "0.1.0", "protocol": 1, "boot": "b", "pid": 42, "socket": "/s"}
    facts |= {"uptime_s": 90.0, "connections": 2, "arena_bytes": 8192, "nvme": "ready"}
    return {"node": {**facts, "arena_prefaulted_bytes": 4096}, **msgspec.to_builtins(stats)}


def test_stats_says_how_well_it_does(node: AnsweringNode) -> None:
    node.reports(wire.Stats, statistics(counters()))
    result = run(node, "stats")
    assert result.exit_code == Exit.OK, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "hit rate 30.0% of lookups, 80.0% of tokens" in lines
    assert "misses unknown_prefix 3, no_state 1, incomplete 0, beyond_limit 0" in lines
    assert "leases 7, 1 overdue, 1.0KiB in quarantine" in lines
    assert "nvme ready, writing paused" in lines
    assert "host 4.0KiB 8.0KiB 50.0% 1 2.0KiB 4.0KiB 11 0B 0" in lines
    assert "nvme 8.0KiB 64.0KiB 12.5% 2 - - 0 0B 13" in lines
    assert f"{LABEL.digest.hex()[:12]} kimi w1 - {LABEL.tenant} 3 2.0KiB" in lines


def test_stats_json_keeps_its_shape(node: AnsweringNode) -> None:
    node.reports(wire.Stats, statistics(counters()))
    found = json.loads(run(node, "stats", "--json").stdout)
    assert list(found) == ["node", "hit_rate", "counters", "gauges", "namespaces"]
    assert found["hit_rate"] == {"lookups": 0.3, "tokens": 0.8}
    assert found["counters"]["misses"]["unknown_prefix"] == 3
    assert found["namespaces"][0]["digest"] == LABEL.digest.hex()
    assert found["namespaces"][0]["counts"] == {"objects": 3, "host": 2048}


def test_nothing_looked_up_is_no_hit_rate(node: AnsweringNode) -> None:
    idle = counters(lookups={"hit_host": 0, "miss": 0}, hit_tokens={}, lookup_tokens={"": 0})
    node.reports(wire.Stats, statistics(idle))
    assert "- of lookups, - of tokens" in run(node, "stats").stdout
    found = json.loads(run(node, "stats", "--json").stdout)
    assert found["hit_rate"] == {"lookups": None, "tokens": None}


def test_watching_goes_on_until_the_node_hangs_up(node: AnsweringNode) -> None:
    node.reports(wire.Stats, statistics(counters()))
    tell = node.say[wire.Stats]
    node.say[wire.Stats] = lambda asked: tell(asked) if len(node.heard) < 4 else b""
    result = run(node, "stats", "--json", "--watch", "0.01")
    assert result.exit_code == Exit.UNREACHABLE
    assert len(result.stdout.splitlines()) == 2
    assert "hung up" in complaint(result)


def test_ls_shows_what_can_be_asked_for(node: AnsweringNode) -> None:
    node.reports(wire.List, commands.Rows([row(1)], 1), commands.Rows([row(2)], 0))
    result = run(node, "ls")
    assert result.exit_code == Exit.OK, result.stderr
    _, first, second = result.stdout.splitlines()
    cells = first.split()
    assert cells[1:9] == ["kv/kv", "0-1", "native", "4-8", "4.0KiB", "host+nvme", "2", "5"]
    assert cells[9].endswith("d")
    assert row(1).key.startswith(cells[0])
    assert row(2).key.startswith(second.split()[0])
    assert row(2).key in run(node, "ls", "--long").stdout


def test_ls_follows_the_pages_and_stops_at_its_limit(node: AnsweringNode) -> None:
    pages = (commands.Rows([row(1)], 7), commands.Rows([], 9), commands.Rows([row(2), row(3)], 0))
    node.reports(wire.List, *pages)
    result = run(node, "ls", "ab", "--json")
    assert [item["key"] for item in json.loads(result.stdout)] == [row(n).key for n in (1, 2, 3)]
    cursors = [(asked.cursor, asked.prefix) for asked in node.heard if isinstance(asked, wire.List)]
    assert cursors == [(0, "ab"), (7, "ab"), (9, "ab")]
    node.reports(wire.List, *pages)
    limited = run(node, "ls", "--limit", "2")
    assert len(limited.stdout.splitlines()) == 3
    assert "first 2" in limited.stderr


def test_pages_fit_the_frames_of_the_node(node: AnsweringNode) -> None:
    node.frame_bytes_max = 3 * admin.ROW_BYTES_MAX
    node.reports(wire.List, commands.Rows([], 0))
    assert json.loads(run(node, "ls", "--json").stdout) == []
    (asked,) = node.asked(wire.List)
    assert isinstance(asked, wire.List)
    assert asked.count == 3


def test_names_of_others_cannot_drive_the_terminal(node: AnsweringNode) -> None:
    label = Label(LABEL.digest, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    node.reports(wire.List, commands.Rows([row(1, label=label)], 0))
    node.reports(wire.Inspect, commands.Rows([row(1, label=label, writer=HOSTILE)], 0))
    node.fails(wire.Evict, "invalid", HOSTILE)
    for args in (["ls"], ["ls", "--json"], ["inspect", "a"], ["inspect", "a", "--json"]):
        result = run(node, *args)
        assert result.exit_code == Exit.OK, result.stderr
        assert all(char.isprintable() or char == "\n" for char in result.stdout), args
    assert r"\x1b]0;own\x07[bold red]\u202e\x9b31m" in run(node, "inspect", "a").stdout
    assert complaint(run(node, "evict", "a")).strip().isprintable()


def test_inspect_prints_everything(node: AnsweringNode) -> None:
    node.reports(wire.Inspect, commands.Rows([row(1)], 0))
    shown = run(node, "inspect", "ab").stdout
    whole = json.loads(run(node, "inspect", "ab", "--json").stdout)[0]
    assert whole["tiers"] == ["host", "nvme"]
    assert whole["nvme"] == {"segment": 3, "offset": 0, "size": 4096}
    for name in ("key", "namespace", "model", "weights", "tokenizer", "tenant", "shard", "codec"):
        assert whole[name] in shown
    for name in ("digest", "layout", "parent", "checksum", "writer", "status"):
        assert whole[name] in shown
    assert "2023-11-14 22:13:20+00:00" in shown
    assert "4-8" in shown


def test_inspect_looks_on_where_a_node_found_nothing_at_once(node: AnsweringNode) -> None:
    node.reports(wire.Inspect, commands.Rows([], 7))
    node.reports(wire.List, commands.Rows([], 8), commands.Rows([row(1)], 9), commands.Rows([], 0))
    result = run(node, "inspect", "ab")
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    assert result.stdout.count("boundary") == 1
    asked = [wire.List(3, 7, 64, "ab"), wire.List(4, 8, 64, "ab"), wire.List(5, 9, 63, "ab")]
    assert node.asked(wire.List) == asked


def test_a_name_that_matches_nothing_is_an_error(node: AnsweringNode) -> None:
    node.reports(wire.List, commands.Rows([], 0))
    node.reports(wire.Inspect, commands.Rows([], 0))
    node.reports(wire.Evict, commands.Evicted(0, 0, 0))
    node.reports(wire.Clear, commands.Evicted(0, 0, 0))
    for args in (["ls", "ff"], ["inspect", "ff"], ["evict", "ff"], ["clear", "ff", "--yes"]):
        result = run(node, *args)
        assert result.exit_code == Exit.CONTENT, args
        assert "ff" in complaint(result)
    assert run(node, "ls").exit_code == Exit.OK
    assert run(node, "clear", "--yes").exit_code == Exit.OK


def test_evict_and_clear_say_what_went(node: AnsweringNode) -> None:
    node.reports(wire.Evict, commands.Evicted(3, 2048, 1))
    node.reports(wire.Clear, commands.Evicted(0, 0, 2))
    result = run(node, "evict", "ab", "--tier", "nvme", "--bytes", "1.5KiB")
    assert result.stdout == "Dropped 3 objects, 2.0KiB; 1 in use, which stayed.\n"
    assert node.asked(wire.Evict) == [wire.Evict(2, "ab", "nvme", 1536)]
    result = run(node, "clear", "ABCD", "--yes", "--json")
    assert json.loads(result.stdout) == {"objects": 0, "nbytes": 0, "busy": 2, "failed": ""}
    assert result.exit_code == Exit.OK
    assert node.asked(wire.Clear) == [wire.Clear(2, "abcd")]

    node.reports(wire.Clear, commands.Evicted(1, 1, 0, failed="nvme"))
    result = run(node, "clear", "--yes")
    assert result.exit_code == Exit.CONTENT
    assert "clear again" in complaint(result)


def test_verify_adds_the_pages_up(node: AnsweringNode) -> None:
    node.reports(wire.Stats, statistics(counters()))
    node.reports(wire.Verify, commands.Verified(2, 10, [], 64), commands.Verified(1, 5, [], 0))
    result = run(node, "verify")
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    assert result.stdout == "Checked 3 copies, 15B: 0 failed.\n"
    bad = (HOSTILE, "nvme", "damaged")
    node.reports(wire.Verify, commands.Verified(2, 10, [bad], 0))
    result = run(node, "verify", "--json")
    assert result.exit_code == Exit.CONTENT
    assert "1 of 2 copies" in complaint(result)
    failed = [{"key": HOSTILE, "tier": "nvme", "fault": "damaged"}]
    assert json.loads(result.stdout) == {"checked": 2, "nbytes": 10, "failed": failed}
    shown = run(node, "verify").stdout
    assert shown.replace("\n", "").isprintable()
    assert "damaged" in shown


def test_the_bar_is_for_terminals_and_stays_off_stdout(node: AnsweringNode) -> None:
    node.reports(wire.Stats, statistics(counters()))
    node.reports(wire.Verify, commands.Verified(9, 10, [], 64), commands.Verified(1, 5, [], 0))
    result = run(node, "verify", "--json", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert json.loads(result.stdout)["checked"] == 10
    assert "verifying" in result.stderr


@pytest.mark.parametrize(
    ("how", "code"),
    [("refused", Exit.REFUSED), ("protocol", Exit.REFUSED), ("invalid", Exit.USAGE)],
)
def test_a_refusal_is_one_line(node: AnsweringNode, how: str, code: Exit) -> None:
    node.fails(wire.Stats, how, "because\nof this")
    result = run(node, "stats")
    assert result.exit_code == code
    assert "because of this" in complaint(result)


def test_a_node_of_another_protocol_is_named(node: AnsweringNode) -> None:
    node.protocol = wire.PROTOCOL + 1
    result = run(node, "ls")
    assert result.exit_code == Exit.REFUSED
    assert "protocol 2" in complaint(result)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"rows": 1}, "not understood"),
        ({"rows": [], "cursor": -1}, "do not advance"),
        ({"rows": [{"key": "k"}], "cursor": 0}, "not understood"),
    ],
)
def test_a_wrong_answer_is_a_protocol_error(
    node: AnsweringNode, body: dict[str, object], expected: str
) -> None:
    node.reports(wire.List, body)
    result = run(node, "ls")
    assert result.exit_code == Exit.REFUSED
    assert expected in complaint(result)


def test_silence_hanging_up_and_noise(node: AnsweringNode) -> None:
    node.say[wire.Stats] = lambda _: None
    silent = run(node, "stats", "--deadline", "0.05")
    assert silent.exit_code == Exit.UNREACHABLE
    assert "--deadline" in complaint(silent)
    node.say[wire.Stats] = lambda _: b""
    gone = run(node, "stats")
    assert gone.exit_code == Exit.UNREACHABLE
    assert "hung up" in complaint(gone)
    node.say[wire.Hello] = lambda _: wire.Failed(0, "refused", "not you")
    refused = run(node, "stats")
    assert refused.exit_code == Exit.REFUSED
    assert "not you" in complaint(refused)
    node.say[wire.Hello] = lambda _: b"HTTP/1.1 200 OK\r\n\r\n"
    noise = run(node, "stats")
    assert noise.exit_code == Exit.REFUSED
    assert "is " in complaint(noise)


def test_every_iterator_checks_that_pages_advance(node: AnsweringNode) -> None:
    node.reports(wire.Verify, commands.Verified(1, 1, [], 5))
    with admin.Admin(str(node.path), 5.0) as connection:
        pages = connection.verify()
        assert next(pages).cursor == 5
        next(pages)
        with pytest.raises(ProtocolError, match="5 after 5"):
            next(pages)


@pytest.mark.parametrize("prefix", ["a" * FRAME_BYTES_MAX, "\udcff"])
def test_what_no_message_can_hold_is_wrong_usage(node: AnsweringNode, prefix: str) -> None:
    result = run(node, "ls", prefix)
    assert result.exit_code == Exit.USAGE
    assert "cannot be sent" in complaint(result)


def test_inspect_stops_where_nobody_reads_on(node: AnsweringNode) -> None:
    node.reports(wire.Inspect, commands.Rows([row(number) for number in range(20)], 0))
    result = run(node, "inspect", "ab")
    assert result.stdout.count("boundary") == result.stdout.count("\n\n") + 1 == 16
    assert "There are more" in result.stderr
    assert len(json.loads(run(node, "inspect", "ab", "--json").stdout)) == 20
