"""An average rate of bytes, kept as a debt that time pays."""

import pytest

from tiercache.core.debt import ByteDebt


def test_debt_is_paid_by_time() -> None:
    debt = ByteDebt(1000)
    assert debt.wait_s(10.0) == 0.0
    debt.add(500, 10.0)
    assert debt.wait_s(10.0) == pytest.approx(0.5)
    assert debt.wait_s(10.4) == pytest.approx(0.1)
    debt.add(1000, 10.4)
    assert debt.wait_s(10.5) == pytest.approx(1.0)
    assert debt.wait_s(60.0) == 0.0


def test_the_average_rate_holds_whatever_the_batches() -> None:
    debt, now, moved = ByteDebt(1000), 0.0, 0
    for size in [1, 700, 30, 2500, 1, 999] * 20:
        now += debt.wait_s(now)
        debt.add(size, now)
        moved += size
    now += debt.wait_s(now)
    assert moved / now == pytest.approx(1000)


def test_time_that_does_not_pass_pays_nothing_and_costs_nothing() -> None:
    debt = ByteDebt(1000)
    debt.add(500, 10.0)
    for now in (10.0, 3.0, 10.0, 9.9):
        assert debt.wait_s(now) == pytest.approx(0.5)
    debt.add(500, 4.0)
    assert debt.wait_s(11.0) == pytest.approx(0.0)
    assert debt.wait_s(2.0) == 0.0
