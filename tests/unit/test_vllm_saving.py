"""What a request completes and is worth saving, and what is believed to be with the node."""

import pytest

from tests.unit.test_vllm_scheduling import BLOCK, OFFERS, TABLES, Asked, Bench
from tiercache.client import Scope
from tiercache.state import Chain
from tiercache_vllm.geometry import Group, Pages
from tiercache_vllm.planning import Answer
from tiercache_vllm.requests import Scheduled
from tiercache_vllm.settings import Settings


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def request_() -> Asked:
    return Asked("r", list(range(600)))


def test_pages_are_saved_once_as_they_become_full(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 0)
    assert bench.saves(request_, 0, 100) == []
    assert bench.saves(request_, 100, 200) == [("latent128", 128, (1,)), ("latent128", 256, (2,))]
    assert bench.saves(request_, 300, 100) == [("latent128", 384, (3,))]
    assert bench.watched.kept == [(1, 128), (1, 256), (1, 384)]
    twin = Asked("twin", request_.all_token_ids)
    bench.matched(twin)
    bench.answer(twin, 0)
    bench.matched(twin)
    assert bench.saves(twin, 0, 520) == [("latent128", 512, (4,))]


def test_tokens_that_are_not_known_yet_are_not_saved(bench: Bench, request_: Asked) -> None:
    """Speculative tokens may be rejected, and asynchronous ones are not here yet."""
    bench.matched(request_)
    bench.answer(request_, 512)
    bench.matched(request_)
    request_.all_token_ids = list(range(639))
    assert bench.saves(request_, 638, 5) == []
    request_.all_token_ids = list(range(640))
    saved = bench.saves(request_, 639, 5)
    assert saved == [("latent128", 640, (5,))]


def test_states_are_saved_where_advised(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    offers = [(0, 9, 256), (1, 10, 256), *OFFERS]
    saved = bench.saves(request_, 0, 600, offers)
    assert [one for one in saved if one[0] != "latent128"] == [
        ("conv", 512, (11, 12)),
        ("recurrent", 512, (11, 12)),
    ]
    assert bench.side.counts["offers_declined"] == 1


def test_states_are_saved_where_another_request_left_the_prefix(bench: Bench) -> None:
    request = Asked("r", list(range(600)), shared_prefix_boundary=256)
    bench.matched(request)
    bench.answer(request, 0)
    bench.matched(request)
    saved = bench.saves(request, 0, 300, [(0, 9, 256), (1, 10, 256)])
    assert ("recurrent", 256, (9, 10)) in saved


def test_states_after_the_prompt_are_saved(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    request_.all_token_ids = list(range(700))
    saved = bench.saves(request_, 600, 60, [(0, 9, 640), (1, 10, 640)])
    assert ("recurrent", 640, (9, 10)) in saved


@pytest.mark.parametrize(
    ("offers", "count"),
    [
        ([(0, 11, 512)], "offers_partial"),
        ([(0, 11, 500), (1, 12, 500)], "offers_unaligned"),
        ([(0, 11, 640), (1, 12, 640)], "offers_unaligned"),
    ],
)
def test_states_that_are_not_whole_are_dropped(
    bench: Bench, request_: Asked, offers: list[tuple[int, int, int]], count: str
) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    saved = bench.saves(request_, 0, 600, offers)
    assert {one[0] for one in saved} == {"latent128"}
    assert bench.side.counts[count] > 0


def test_offers_of_requests_that_are_not_in_the_step_are_dropped(
    bench: Bench, request_: Asked
) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    assert bench.side.saves([], {"r": OFFERS}, lambda _: TABLES) == ()
    assert bench.side.saves([Scheduled("gone", 0, 600)], {"gone": OFFERS}, lambda _: TABLES) == ()


def test_a_null_block_is_never_read(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    saved = bench.saves(request_, 0, 600, tables=([], [], [0, 2, 0, 4]))
    assert saved == [("latent128", 256, (2,)), ("latent128", 512, (4,))]
    assert bench.saves(request_, 0, 600, tables=None) == []


def test_a_job_says_where_the_request_resumed(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 256)
    bench.matched(request_)
    bench.side.allocated(request_, ([0, 11], [0, 12], [1, 2]), 256)
    bench.side.ended({"r"}, ())
    (job,) = bench.side.saves([Scheduled("r", 256, 200)], {}, lambda _: TABLES)
    assert job.parent == Chain(request_.all_token_ids, BLOCK).digest_at(256)


def test_a_step_hands_over_no_more_than_it_may(request_: Asked) -> None:
    page = 128 * 576 * 2
    bench = Bench(settings=Settings("/s", step_bytes_max=2 * page))
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    assert [len(bench.saves(request_, 0, 600)) for _ in range(3)] == [2, 2, 0]


def test_what_was_not_stored_is_offered_again(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    bench.saves(request_, 0, 300)
    bench.side.unsaved([Chain(request_.all_token_ids, BLOCK).digest_at(256)])
    assert bench.watched.gone
    twin = Asked("twin", request_.all_token_ids)
    bench.matched(twin)
    bench.answer(twin, 0)
    bench.matched(twin)
    assert bench.saves(twin, 0, 300) == [("latent128", 256, (2,))]


def test_what_the_node_lost_is_offered_again(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    bench.saves(request_, 0, 600, OFFERS)
    twin = Asked("twin", request_.all_token_ids)
    bench.matched(twin)
    bench.answer(twin, 0)
    bench.matched(twin)
    assert bench.side.counts["lost"] == 1
    assert len(bench.saves(twin, 0, 600, OFFERS)) == 6


def test_a_node_that_does_not_answer_has_not_lost_anything(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    bench.saves(request_, 0, 600, OFFERS)
    twin = Asked("twin", request_.all_token_ids)
    bench.matched(twin)
    chain = Chain(request_.all_token_ids, BLOCK)
    bench.oracle.futures[-1].set_result(Answer("unavailable: away", chain, Scope()))
    assert bench.matched(twin) == 0
    assert bench.saves(twin, 0, 600) == []
    assert bench.side.counts["lost"] == 0


def test_tenants_are_told_apart(bench: Bench, request_: Asked) -> None:
    for salt in ("a", "b"):
        request = Asked(salt, request_.all_token_ids)
        bench.matched(request)
        bench.answer(request, 0, salt=salt)
        bench.matched(request)
        assert len(bench.saves(request, 0, 600, OFFERS)) == 6


def test_advice_that_was_not_followed_counts(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    bench.matched(request_)
    bench.saves(request_, 0, 600)
    bench.side.finished("r")
    assert bench.side.counts["advice_unfollowed"] == 1


def test_of_pages_alone_the_next_one_tells() -> None:
    full = Group(0, 128, pages=(Pages("0", "bfloat16", 2, 8, 2),))
    bench = Bench([full])
    request = Asked("r", list(range(600)))
    bench.matched(request)
    bench.answer(request, 0)
    bench.matched(request)
    assert len(bench.saves(request, 0, 600, tables=([1, 2, 3, 4],))) == 4
    for name, boundary, lost in (("all", 512, 0), ("some", 256, 1), ("none", 0, 1)):
        twin = Asked(name, request.all_token_ids)
        bench.matched(twin)
        bench.answer(twin, boundary)
        bench.matched(twin)
        assert bench.side.counts["lost"] == lost
