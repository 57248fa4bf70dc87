"""Every message has its event, every answer its message."""

import json
from typing import get_args

import pytest

from tiercache.core import commands, events, guard_events
from tiercache.core.cluster.commands import Agreed, Lent, Located, Place, Places, Summarised, Taken
from tiercache.core.cluster.events import WhereAsked
from tiercache.errors import Fault
from tiercache.runtime.translate import (
    INSPECT_ROWS_MAX,
    WAIT_MS_MAX,
    Caller,
    NodeFacts,
    Spoken,
    Telling,
    to_event,
    to_reply,
)
from tiercache.state import (
    Care,
    Extent,
    Hint,
    Key,
    Kind,
    Label,
    Layout,
    Namespace,
    Part,
    Piece,
    Record,
    Shard,
    Tensor,
)
from tiercache.wire import clustering, guarding, sharing, surveying
from tiercache.wire import messages as wire

KV = Part("kv", Kind.KV, None, 4, 2, (Tensor("k", "float16", (2, 4), ("head", "dim"), 0),))
LAYOUT = Layout((KV,), 4)
NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
CALLER = Caller(7, "engine")
D = bytes(range(32))
CARE = Care(60_000, -1, Hint.TOOL_CALL_PENDING, False)
FACTS = NodeFacts("1", 1, "b", 1, "/s", 1.5, 2, 4096, 0, "off")
TELLING = Telling(FACTS, {"requests": {"": 3}}, {"ready": {"": 1.0}})
PIECE = Piece(0, 0, 2, "native", 0, 4, 0, 4096, 64)

CASES: list[tuple[Spoken, events.Event]] = [
    (
        wire.Attach(1, NAMESPACE, LAYOUT, 2, 1, True, 9000.0),
        events.Attached(7, 1, NAMESPACE, LAYOUT, 2, 1, True, "engine", 9000.0),
    ),
    (
        wire.Plan(
            2, "r", "l", "s", D + D[::-1], 9, 8, [wire.Tail(6, D, D)], ["native"],
            wire.Capture(4, 2), True, True, [wire.Tail(9, D[::-1], D)],
        ),
        events.PlanAsked(
            7, 2, "r", "l", "s", [D, D[::-1]], 9, 8, [events.Tail(6, D, D)], ("native",),
            events.Capture(4, 2), True, True, [events.Tail(9, D[::-1], D)],
        ),
    ),
    (
        surveying.Survey(18, "r", "l", "s", D + D[::-1], ["native", "x"], 500, D),
        events.SurveyAsked(7, 18, "r", "l", "s", [D, D[::-1]], ("native", "x"), 100.5, [D]),
    ),
    (
        sharing.Push(19, "r", "l", "s", D + D[::-1], 8, ["native", "x"], True, "b", 500),
        events.PushAsked(
            7, 19, "r", "l", "s", [D, D[::-1]], 8, ("native", "x"), True, "b", 100.5
        ),
    ),
    (
        sharing.Where(20, D, "l", "s", D + D[::-1], 4, 8, ["native", "x"], True),
        WhereAsked(7, 20, D, "l", "s", [D, D[::-1]], 4, 8, ("native", "x"), True),
    ),
    (
        wire.Load(3, "r", "l", "s", 64, b"d" * 32, 1500),
        events.LoadAsked(7, 3, "r", "l", "s", 64, b"d" * 32, 101.5),
    ),
    (
        wire.Reserve(
            4, "r", "l", "s", [wire.Offer(0, 0, 2, "native", D, b"", 0, 4, 64, D, 1)], CARE
        ),
        events.ReserveAsked(
            7, 4, "r", "l", "s",
            [events.Offer(0, Shard(0, 2), "native", D, b"", 0, 4, 64, D, 1)], CARE,
        ),
    ),
    (
        wire.Fetch(5, "r", "l", "s", [wire.Wanted(0, 0, 1, "native", D)], 0),
        events.FetchAsked(
            7, 5, "r", "l", "s", [events.Wanted(0, Shard(0, 1), "native", D)], 100.0
        ),
    ),
    (wire.Flush(6, True, 250), events.FlushAsked(7, 6, True, 100.25)),
    (wire.Stats(7), events.StatsAsked(7, 7)),
    (wire.List(8, 3, 10, "ab"), events.ListAsked(7, 8, 3, 10, "ab")),
    (wire.Inspect(9, "ab"), events.ListAsked(7, 9, 0, INSPECT_ROWS_MAX, "ab")),
    (wire.Evict(10, "ab", "host", 5), events.EvictAsked(7, 10, "ab", "host", 5)),
    (wire.Clear(11, "ab"), events.ClearAsked(7, 11, "ab")),
    (wire.Verify(12, 3, 10), events.VerifyAsked(7, 12, 3, 10)),
    (
        guarding.Pin(13, "l", "s", D, 5, D, 1500),
        guard_events.PinAsked(7, 13, "l", "s", [D], 5, D, 1.5),
    ),
    (guarding.Unpin(14, 3, "o"), guard_events.UnpinAsked(7, 14, 3, "o")),
    (guarding.PinKeys(15, "ab", "o", 1500), guard_events.KeysPinAsked(7, 15, "ab", "o", 1.5)),
    (guarding.Pins(16), guard_events.PinsAsked(7, 16)),
    (guarding.Shares(17, "t", 0.5, None), guard_events.SharesAsked(7, 17, "t", 0.5, None)),
    (wire.Commit([1, 2]), events.Committed(7, [1, 2])),
    (wire.Cancel([1]), events.Cancelled(7, [1])),
    (wire.Release(["r"]), events.Released(7, ["r"])),
]  # fmt: skip


@pytest.mark.parametrize(("message", "event"), CASES, ids=lambda case: type(case).__name__)
def test_a_message_becomes_its_event(message: Spoken, event: events.Event) -> None:
    assert to_event(message, CALLER, 100.0) == event


def test_every_message_has_an_event() -> None:
    not_for_the_core = {wire.Hello, wire.Detach, *get_args(clustering.Request)}
    spoken = {type(message) for message, _ in CASES}
    assert spoken == set(get_args(wire.FromClient)) - not_for_the_core
    assert spoken == set(get_args(Spoken))


@pytest.mark.parametrize(("asked", "until"), [(-5, 100.0), (10**15, 100.0 + WAIT_MS_MAX / 1000)])
def test_every_wait_is_bounded(asked: int, until: float) -> None:
    assert to_event(wire.Flush(1, False, asked), CALLER, 100.0) == events.FlushAsked(
        7, 1, False, until
    )


def test_a_chain_that_is_no_digests_is_refused() -> None:
    plan = wire.Plan(2, "r", "", "", D + b"x", 9, 8, [], ["native"], wire.Capture(), False)
    with pytest.raises(ValueError, match="33 bytes"):
        to_event(plan, CALLER, 0.0)


RECORD = Record(Key(D, "kv", Shard(0, 2), "native", D), 0, 4, 64, b"c" * 16, "engine", 1.0)
ANSWERS: list[tuple[commands.ReplyBody, wire.Reply]] = [
    (
        commands.Planned(8, False, 4, [PIECE], [9], [events.Tail(6, D, D)], "why"),
        wire.Planned(5, 8, False, 4, [PIECE], [9], [wire.Tail(6, D, D)], "why"),
    ),
    (commands.Surveyed([b"\1", b"\0"], 8), surveying.Surveyed(5, [b"\1", b"\0"], 8)),
    (commands.Loaded(4, [PIECE], ""), wire.Loaded(5, 4, [PIECE], "")),
    (
        commands.Reserved(
            [
                commands.Granted("granted", 3, Extent(1, 4096, 8192), 2),
                commands.Granted("held", 0, None),
            ]
        ),
        wire.Reserved(5, [wire.Grant("granted", 3, 1, 4096, 2), wire.Grant("held")]),
    ),
    (commands.Fetched([PIECE, None]), wire.Fetched(5, [PIECE, None])),
    (
        commands.Pinned("pinned", 3, 6, 4096, 1.5),
        guarding.Pinned(5, "pinned", 3, 6, 4096, 1500),
    ),
    (commands.Flushed(1, 2), wire.Flushed(5, 1, 2)),
    (commands.Pushed(64, "reason"), sharing.Pushed(5, 64, "reason")),
    (
        Places([Place("", 8, "nvme", 9, 7, 0.5, 2.0), Place("b", 4, "peer", -1, -1, -1)], "", 4),
        sharing.Places(
            5,
            [
                sharing.Place("", 8, "nvme", 9, 7, 0.5, 2.0, ""),
                sharing.Place("b", 4, "peer", -1, -1, -1, -1.0, ""),
            ],
            "",
            4,
        ),
    ),
    (commands.Refused("invalid", "text"), wire.Failed(5, "invalid", "text")),
]


@pytest.mark.parametrize(("body", "message"), ANSWERS, ids=lambda case: type(case).__name__)
def test_an_answer_becomes_its_message(body: commands.ReplyBody, message: wire.Reply) -> None:
    assert to_reply(5, body, lambda: TELLING) == message


def document(body: commands.ReplyBody) -> object:
    reply = to_reply(5, body, lambda: TELLING)
    assert isinstance(reply, wire.Report)
    return json.loads(reply.body)


def test_reports_are_json_documents() -> None:
    assert document(commands.Evicted(1, 2, 3)) == {
        "objects": 1,
        "nbytes": 2,
        "busy": 3,
        "failed": "",
    }
    pin = commands.PinRow(1, "o", 0, 6, 4096, 1.5)
    assert document(commands.PinRows([pin], 1, 4096, 8192)) == {
        "pins": [
            {"number": 1, "owner": "o", "session": 0, "objects": 6, "nbytes": 4096, "left_s": 1.5}
        ],
        "count": 1,
        "nbytes": 4096,
        "nbytes_max": 8192,
    }
    taken = {"host": 1, "nvme": 2}
    share = commands.ShareRow("-", 0.5, 1.0, taken, taken, {"stored": 3})
    assert document(commands.ShareRows(1.0, 1.0, [share])) == {
        "host": 1.0,
        "nvme": 1.0,
        "tenants": [
            {"tenant": "-", "host": 0.5, "nvme": 1.0, "allowed": taken, "taken": taken,
             "outcomes": {"stored": 3}, "common": False}
        ],
    }  # fmt: skip
    assert document(commands.Verified(2, 64, [("k", "nvme", Fault.DAMAGED.value)], 9)) == {
        "checked": 2,
        "nbytes": 64,
        "failed": [["k", "nvme", "damaged"]],
        "cursor": 9,
    }
    row = commands.Row(
        1, "key", RECORD, "kv", None, "", Extent(0, 4096, 4096), None, "sealed", 0, 1
    )
    rows = document(commands.Rows([row], 0))
    assert isinstance(rows, dict)
    assert rows["rows"][0]["host"] == [0, 4096, 4096]
    assert rows["rows"][0]["record"]["key"]["part"] == "kv"


def test_the_answer_to_stats_says_who_answers() -> None:
    label = Label(D, "m", "w", "t", "", "-")
    stats = document(commands.Stats({"commits": {"": 1}}, {"leases": {"": 0}}, [(label, {"n": 1})]))
    assert isinstance(stats, dict)
    assert stats["node"]["boot"] == "b"
    assert stats["counters"] == {"commits": {"": 1}, "requests": {"": 3}}
    assert stats["gauges"] == {"leases": {"": 0}, "ready": {"": 1}}
    assert stats["namespaces"][0][1] == {"n": 1}


def test_only_the_session_answers_an_accepted_attach() -> None:
    with pytest.raises(AssertionError):
        to_reply(5, commands.Accepted(), lambda: TELLING)


def test_every_answer_is_covered() -> None:
    covered = {type(body) for body, _ in ANSWERS} | {
        commands.Accepted,
        commands.Rows,
        commands.Evicted,
        commands.Verified,
        commands.PinRows,
        commands.ShareRows,
        commands.Stats,
    }
    for_other_nodes = {Located, Lent, Summarised, Taken, Agreed}
    assert covered == set(get_args(commands.ReplyBody)) - for_other_nodes
