import math

import pytest

from xla_b2t.training.meter import HISTORY, RATE_WINDOW_S, Curve, Meter


def test_meter_remaining_time_follows_from_the_pace():
    meter = Meter(total=100, first_step=0, now=0.0)
    assert meter.remaining_s(5.0) is None
    for step in range(1, 11):
        meter.update(step, 1.0, 10.0, now=20.0 + 2.0 * step)
    # The first step waited 20 s for a compile: it does not count.
    assert meter.remaining_s(40.0) == pytest.approx(180.0)
    assert meter.remaining_s(41.0) == pytest.approx(179.0)


def test_meter_remaining_time_leaves_compiles_out():
    meter, now = Meter(total=100, first_step=0, now=0.0), 0.0
    for step in range(1, 21):
        meter.phase = "compile" if step in (1, 2, 9) else "train"
        now += 60.0 if meter.phase == "compile" else 1.0
        meter.update(step, None, 10.0, now)
    # 17 seconds of steps for 19 of them; the three compiles are behind us.
    assert meter.remaining_s(now) == pytest.approx(80 * 17 / 19)


def test_meter_remaining_time_forgets_what_was_long_ago():
    meter = Meter(total=1000, first_step=0, now=0.0)
    for step in range(1, 11):
        meter.update(step, None, 1.0, now=100.0 * step)
    for step in range(11, 111):
        meter.update(step, None, 1.0, now=1000.0 + (step - 10))
    assert meter.remaining_s(1100.0) == pytest.approx(890.0)
    assert RATE_WINDOW_S < 100


def test_meter_resumed_counts_from_its_first_step():
    meter = Meter(total=1000, first_step=900, now=0.0)
    assert (meter.share, meter.progress_text()) == (0.9, "  900/1,000  90 %")


@pytest.mark.parametrize(("total", "step", "share"), [(0, 0, 1.0), (10, 0, 0.0), (10, 10, 1.0), (10, 12, 1.0)])
def test_meter_share_stays_between_0_and_1(total, step, share):
    assert Meter(total, step, 0.0).share == share


def test_meter_line_says_everything_that_is_known():
    meter = Meter(total=2000, first_step=0, now=0.0)
    assert meter.line(3.0) == "train     0/2,000   0 %   0:03 so far"
    meter.update(20, 2.5, 1834.4, now=10.0)
    meter.update(40, 1.25, 1834.4, now=12.0)
    assert meter.validated(40, 0.4567)
    assert meter.line(12.0) == "train    40/2,000   2 %   loss 1.250   val PER 45.7 %   1,834 trials/s   3:16 left"
    meter.update(2000, 0.5, 1834.4, now=4000.0)
    assert meter.line(4000.0).endswith("1:06:40 so far")


def test_meter_knows_the_best_validation():
    meter = Meter(10, 0, 0.0)
    assert [meter.validated(step, per) for step, per in enumerate([0.5, 0.6, 0.4, 0.4])] == [True, False, True, True]
    assert (meter.pers.lowest, meter.pers.last) == (0.4, 0.4)


def test_curve_sparkline_spans_lowest_to_highest():
    curve = Curve()
    for value in range(8):
        curve.add(float(value))
    assert curve.sparkline(8) == "▁▂▃▄▅▆▇█"
    assert curve.sparkline(4) == "▁▃▆█"
    assert curve.sparkline(1) == ""


def test_curve_that_is_flat_or_not_finite_still_draws():
    curve = Curve()
    for value in (1.0, math.nan, 1.0, math.inf, 1.0):
        curve.add(value)
    assert curve.sparkline(10) == "▁▁▁"


def test_curve_stays_short_and_keeps_its_whole_course():
    curve = Curve()
    for value in range(100_000):
        curve.add(float(value))
    assert len(curve.points) <= HISTORY
    assert curve.points[0] == 0.0
    assert curve.points[-1] > 99_000
    assert curve.points == sorted(curve.points)
    assert (curve.last, curve.lowest) == (99_999.0, 0.0)
