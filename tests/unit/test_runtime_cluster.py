"""What nodes say to one another, and what comes of a peer that says anything."""

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core import commands, events
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.errors import PeerFault, ProtocolError
from tiercache.runtime.cluster import messages as said
from tiercache.runtime.cluster.calls import PEERS, Calls
from tiercache.runtime.cluster.keys import key_of, packed_key
from tiercache.runtime.cluster.lender import WAIT_MS_MAX, Lender
from tiercache.state import Care, Extent, Key, Record, Shard
from tiercache.tiers.memory import MemoryArena
from tiercache.transport.base import Asked, Lent, Loan

PAGE = 4096
SPACE = bytes(range(32))
KEY = Key(SPACE, "kv", Shard(0, 2), "native", bytes(32))
RECORD = Record(KEY, 0, 16, 100, bytes(16), "engine-0", 1e9)
DIGESTS = [bytes([number]) * 32 for number in range(3)]
LOCATE = cm.Locate(
    5, "b", "boot", "r", SPACE, DIGESTS, 48, 16, 1, ("native",), reshard=False, flush=7
)
AGREE = cm.Agree(
    5, "b", "boot", "engine", "r", SPACE, DIGESTS, 49, 48, 4, 2, 4, ("native",), reshard=True,
    chunk_tokens=8, grain=16, care=Care(priority=1), flush=7, ends=[16, 48], wait_s=0.3,
)  # fmt: skip


# --- messages


def test_a_question_arrives_as_it_was_meant() -> None:
    question = said.decoded_question(said.encode(said.question_of(LOCATE, 0.25)))
    assert isinstance(question, said.Locate)
    assert said.digests_of(question) == DIGESTS
    assert (question.request, question.namespace, question.limit, question.whole) == (
        "r", SPACE, 48, 16,
    )  # fmt: skip
    assert (question.codecs, question.flush, question.wait_ms) == (["native"], 7, 250)


@pytest.mark.parametrize(
    ("question", "newer"),
    [
        (said.question_of(msgspec.structs.replace(LOCATE, first=1, stop=2, some=True), 0.25), 3),
        (said.agree_of(AGREE, 0.25), 1),
    ],
)
def test_nodes_that_know_nothing_of_seats_and_nodes_that_do_understand_one_another(
    question: said.Question, newer: int
) -> None:
    """What an older node sends means all ranks, and an answer at once; what it does not know it ignores."""
    fields = msgspec.msgpack.decode(said.encode(question))
    understood = said.decoded_question(msgspec.msgpack.encode(fields[:-newer]))
    names = type(question).__struct_fields__[-newer:]
    assert understood == msgspec.structs.replace(question, **dict.fromkeys(names, 0))
    assert said.decoded_question(msgspec.msgpack.encode([*fields, "newer still"])) == question


def test_an_answer_arrives_as_it_was_meant() -> None:
    record = replace(RECORD, parent=DIGESTS[0], requantised=2)
    body = said.encode(said.answer_of(cm.Located(16, [RECORD, record])))
    answer = said.decoded_answer(body)
    assert isinstance(answer, said.Located)
    assert said.records_of(answer, SPACE) == [RECORD, record]
    told = said.decoded_answer(said.encode(said.answer_of(cm.Summarised(3, True, [1, 2], [3]))))
    assert isinstance(told, said.Summary)
    assert (said.names_of(told.added), said.names_of(told.removed)) == ([1, 2], [3])


def test_what_other_ranks_have_is_asked_and_answered_as_it_was_meant() -> None:
    question = said.decoded_question(said.encode(said.agree_of(AGREE, 0.25)))
    assert isinstance(question, said.Agree)
    assert said.digests_of(question) == DIGESTS
    found = msgspec.structs.asdict(question) | {"digests": DIGESTS, "codecs": ("native",)}
    assert found.pop("wait_ms") == 250
    assert found.items() <= msgspec.structs.asdict(AGREE).items()
    answer = said.decoded_answer(said.encode(said.answer_of(cm.Agreed([48, 16]))))
    assert answer == said.Agreed([48, 16])


def test_what_has_no_place_in_a_small_record_stays_at_home() -> None:
    record = replace(RECORD, writer="w" * 10_000, sealed_at=float("inf"))
    answer = said.decoded_answer(said.encode(said.answer_of(cm.Located(16, [record]))))
    assert isinstance(answer, said.Located)
    assert len(answer.records[0].writer) == said.WRITER_CHARS_MAX
    assert answer.records[0].sealed_at == said.WALL_S_MAX


@given(st.binary(max_size=200))
def test_any_bytes_are_no_question_and_no_answer(body: bytes) -> None:
    assert said.decoded_question(body) is None or body
    with contextlib.suppress(ProtocolError):
        said.decoded_answer(body)


@given(st.data())
def test_a_damaged_answer_is_an_error_or_an_answer(data: st.DataObject) -> None:
    body = bytearray(said.encode(said.answer_of(cm.Located(16, [RECORD, RECORD]))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        answer = said.decoded_answer(bytes(body))
        if isinstance(answer, said.Located):
            said.records_of(answer, SPACE)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"checksum": b"short"},
        {"checksum": b""},
        {"sealed_at": float("nan")},
        {"sealed_at": -1.0},
        {"codec": "c" * 129},
        {"digest": bytes(31)},
        {"nbytes": -1},
        {"parent": bytes(33)},
    ],
)
def test_records_that_cannot_be_are_no_answer(changes: dict[str, object]) -> None:
    answer = said.answer_of(cm.Located(16, [RECORD]))
    assert isinstance(answer, said.Located)
    wrong = msgspec.structs.replace(answer.records[0], **changes)
    with pytest.raises(ProtocolError):
        said.decoded_answer(said.encode(msgspec.structs.replace(answer, records=[wrong])))


def test_what_a_newer_version_adds_is_ignored_and_what_it_asks_is_not_known() -> None:
    longer = msgspec.msgpack.encode(["summarise", 4, "more", {"to": "come"}])
    assert said.decoded_question(longer) == said.Summarise(4)
    assert said.decoded_question(msgspec.msgpack.encode(["dance", 1])) is None
    assert said.decoded_question(b"\x91" * 100_000) is None
    unknown = said.decoded_answer(msgspec.msgpack.encode(["unknown"]))
    assert isinstance(unknown, said.Unknown)


def test_names_and_digests_that_are_no_whole_number() -> None:
    with pytest.raises(ProtocolError):
        said.names_of(bytes(9))
    question = said.question_of(LOCATE, 0.1)
    assert said.digests_of(msgspec.structs.replace(question, digests=bytes(33))) == []


@given(st.binary(max_size=100))
def test_any_bytes_are_no_key(packed: bytes) -> None:
    assert key_of(packed) is None


def test_a_key_comes_back() -> None:
    assert key_of(packed_key(KEY)) == KEY


# --- lending


class Answering:
    """A machine that answers with what the test says, or not yet."""

    def __init__(self) -> None:
        self.heard: list[events.Event] = []
        self.answer: commands.ReplyBody | None = None
        self.calls = Calls(self.take, names_max=2)

    def take(self, event: events.Event) -> None:
        self.heard.append(event)
        if self.answer is not None and isinstance(event, ev.LocateAsked | ev.LendAsked):
            self.calls.answered(commands.Reply(event.session, event.call, self.answer))


@pytest.fixture
def machine() -> Answering:
    return Answering()


@pytest.fixture
def lender(machine: Answering) -> Lender:
    return Lender(MemoryArena([4 * PAGE]), machine.calls, lambda: 100.0, hold_s=5.0)


def test_for_which_ranks_and_how_long_goes_into_the_event(
    machine: Answering, lender: Lender
) -> None:
    answers: list[bytes] = []
    locate = msgspec.structs.replace(LOCATE, first=1, stop=2, some=True)
    lender.ask("b", said.encode(said.question_of(locate, 0.25)), answers.append)
    lender.ask("b", said.encode(said.agree_of(AGREE, 0.25)), answers.append)
    located, agreed = machine.heard
    assert isinstance(located, ev.LocateAsked)
    assert (located.first, located.stop, located.some) == (1, 2, True)
    assert located.deadline == 100.25
    assert isinstance(agreed, ev.AgreeAsked)
    assert (agreed.first, agreed.stop, agreed.deadline, agreed.until) == (2, 4, 100.25, 105.0)


def test_a_question_becomes_an_event_and_its_answer_a_message(
    machine: Answering, lender: Lender
) -> None:
    machine.answer = cm.Located(16, [RECORD])
    answers: list[bytes] = []
    lender.ask("b", said.encode(said.question_of(LOCATE, 0.5)), answers.append)
    (asked,) = machine.heard
    assert isinstance(asked, ev.LocateAsked)
    assert (asked.session, asked.peer, asked.digests) == (PEERS, "b", DIGESTS)
    assert (asked.deadline, asked.until) == (100.5, 105.5)
    answer = said.decoded_answer(answers[0])
    assert isinstance(answer, said.Located)
    assert answer.boundary == 16


def test_nobody_makes_a_node_wait_for_ever(machine: Answering, lender: Lender) -> None:
    question = msgspec.structs.replace(said.question_of(LOCATE, 0.5), wait_ms=(1 << 53) - 1)
    lender.ask("b", said.encode(question), lambda _: None)
    (asked,) = machine.heard
    assert isinstance(asked, ev.LocateAsked)
    assert asked.deadline == 100.0 + WAIT_MS_MAX / 1000


@pytest.mark.parametrize("body", [b"", b"\xc1", struct.pack(">I", 7), b"\x93\xa6locate\x01\x02"])
def test_nonsense_is_answered_and_nothing_is_asked(
    machine: Answering, lender: Lender, body: bytes
) -> None:
    answers: list[bytes] = []
    lender.ask("b", body, answers.append)
    assert isinstance(said.decoded_answer(answers[0]), said.Unknown)
    assert machine.heard == []


def test_many_names_are_too_many(machine: Answering, lender: Lender) -> None:
    machine.answer = cm.Lent([])
    body = said.encode(said.Summarise(-1))
    answers: list[bytes] = []
    for name in ("b", "c", "d", "b"):
        lender.ask(name, body, answers.append)
    assert [said.decoded_answer(each) for each in answers] == [said.Unknown()]
    assert len(machine.heard) == 3
    lent: list[Sequence[Lent]] = []
    lender.lend("e", [Asked(b"k", 1, 0, 1)], lent.append)
    assert lent == [[PeerFault.BUSY]]


def test_the_loan_is_over_once_when_all_of_it_is(machine: Answering, lender: Lender) -> None:
    place = (Extent(0, PAGE, PAGE), 100, bytes(16))
    machine.answer = cm.Lent([place, None, place])
    got: list[Sequence[Lent]] = []
    asked = [Asked(packed_key(KEY), 100, 0, 100)] * 3
    lender.lend("b", [asked[0], Asked(b"no key", 1, 0, 1), *asked[1:]], got.append)
    first, nonsense, missing, last = got[0]
    assert nonsense is missing is PeerFault.MISSING
    assert isinstance(first, Loan)
    assert isinstance(last, Loan)
    assert (len(first.view), first.view.readonly) == (100, True)
    first.release()
    assert not any(isinstance(each, ev.LoanOver) for each in machine.heard)
    last.release()
    (lending,) = [each for each in machine.heard if isinstance(each, ev.LendAsked)]
    assert machine.heard[-1] == ev.LoanOver(lending.session, lending.call)


def test_where_nothing_is_lent_no_loan_is_over(machine: Answering, lender: Lender) -> None:
    machine.answer = cm.Lent([None])
    got: list[Sequence[Lent]] = []
    lender.lend("b", [Asked(packed_key(KEY), 100, 0, 100)], got.append)
    assert got == [[PeerFault.MISSING]]
    assert len(machine.heard) == 1


def test_an_answer_for_a_node_that_left_goes_nowhere(machine: Answering, lender: Lender) -> None:
    answers: list[bytes] = []
    lender.ask("b", said.encode(said.question_of(LOCATE, 0.5)), answers.append)
    lender.left("b")
    (asked, left) = machine.heard
    assert isinstance(asked, ev.LocateAsked)
    assert left == ev.PeerLeft(PEERS)
    machine.calls.answered(commands.Reply(PEERS, asked.call, cm.Located(0, [])))
    assert answers == []
