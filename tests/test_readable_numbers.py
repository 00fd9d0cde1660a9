"""Test that numbers for readers have enough digits."""

from __future__ import annotations

import math

import pytest

from megatron.readable_numbers import clock, decimals, told_apart


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((2.077e-05, 3.014e-05), ["0.0000208", "0.0000301"]),
        ((14.5316, 13.0328), ["14.5", "13.0"]),
        ((14.5316, 14.5328), ["14.532", "14.533"]),
        ((9.997, 10.0), ["9.997", "10.00"]),
        ((1234.5, 0.0), ["1,234", "0"]),
        ((3.46573590, 3.46573591), ["3.46574", "3.46574"]),
        ((2.5, 2.5), ["2.50", "2.50"]),
        ((math.inf, -0.5), ["inf", "-0.500"]),
    ],
)
def test_values_have_three_digits_or_as_many_as_tell_them_apart(values, texts):
    assert told_apart(*values) == texts


def test_decimals_show_significant_digits():
    assert [decimals(v, 2) for v in (0.0, math.nan, 123.0, 9.5, -0.05, 2e-6)] == [0, 0, 0, 1, 3, 7]


def test_a_duration_has_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (0, 59.6, 3723)] == ["0:00:00", "0:01:00", "1:02:03"]
