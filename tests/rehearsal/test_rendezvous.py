"""Test which logs of ranks fit together, on logs that are written by hand."""

import pytest

from megatron.rehearsal.event_log import Event, ranks_text
from megatron.rehearsal.rendezvous import Strand, unmatched

MEMBERS = {"0, 1": (0, 1), "2, 3": (2, 3), "0, 2": (0, 2), "1, 3": (1, 3), "0 to 3": (0, 1, 2, 3)}


def total(group, what="float32[2], SUM", where="a.py:1"):
    return Event("allreduce", group, None, what, where)


def send(rank, what="float32[2]"):
    return Event("send", "0 to 3", rank, what, "s.py:1")


def receive(rank, what="float32[2]"):
    return Event("recv", "0 to 3", rank, what, "r.py:1")


def verdict(*threads):
    """Return the verdict on threads, given as (rank, event, event, ...)."""
    return unmatched([Strand(rank, events) for rank, *events in threads], MEMBERS)


def test_ranks_that_wait_for_nobody_for_ever_fit_together():
    tensor, data = ("0, 1", "2, 3"), ("0, 2", "1, 3")
    assert not verdict(
        (0, total(tensor[0]), total(data[0]), total("0 to 3")),
        (1, total(tensor[0]), total(data[1]), total("0 to 3")),
        (2, total(data[0]), total(tensor[1]), total("0 to 3")),
        (3, total(data[1]), total(tensor[1]), total("0 to 3")),
    )
    # The same orders in a circle: each of the four waits for the next.
    found = verdict(
        (0, total(tensor[0]), total(data[0])),
        (1, total(data[1]), total(tensor[0])),
        (2, total(data[0]), total(tensor[1])),
        (3, total(tensor[1]), total(data[1])),
    )
    assert found.startswith("ranks wait for ever:\n  rank 0 waits in allreduce of float32[2]")
    assert len(found.splitlines()) == 5


def test_messages_meet_in_their_order():
    assert not verdict((0, send(1), receive(1)), (1, receive(0), send(0)))
    found = verdict((0, send(1), receive(1)), (1, send(0), receive(0)))
    assert "rank 0 waits in send to rank 1" in found and "rank 1 waits in send to rank 0" in found
    found = verdict((0, send(1)), (1, receive(0, "int64[2]")))
    assert found == (
        "ranks meet in operations that do not fit together:\n"
        "  rank 0: send to rank 1 of float32[2] (s.py:1)\n"
        "  rank 1: recv from rank 0 of int64[2] (r.py:1)"
    )


@pytest.mark.parametrize(
    "other",
    [
        total("0, 1", "float32[3], SUM"),
        total("0, 1", "bfloat16[2], SUM"),
        total("0, 1", "float32[2], MAX"),
        total("0, 1", where="a.py:2"),
        Event("barrier", "0, 1", None, "", "a.py:1"),
    ],
    ids=str,
)
def test_ranks_must_meet_in_the_same_operation_and_line(other):
    found = verdict((0, total("0, 1")), (1, other))
    assert found.startswith("ranks meet in operations that do not fit together:\n  rank 0: allred")


def test_the_root_of_a_broadcast_may_stand_in_another_line():
    root, other, third = (
        Event("broadcast", "0, 1", root, "float32[2]", f"a.py:{line}")
        for root, line in ((0, 1), (0, 2), (1, 2))
    )
    assert not verdict((0, root), (1, other))
    assert "broadcast from rank 1 of float32[2] over the ranks 0, 1" in verdict(
        (0, root), (1, third)
    )


def test_a_rank_that_ended_is_named():
    found = verdict((0, total("0, 1"), total("0, 1", where="b.py:9")), (1, total("0, 1")))
    assert found == (
        "ranks wait for ever:\n"
        "  rank 0 waits in allreduce of float32[2], SUM over the ranks 0, 1 (b.py:9)\n"
        "  rank 1 has ended after allreduce of float32[2], SUM over the ranks 0, 1 (a.py:1)"
    )


def test_the_threads_of_a_rank_go_on_independently():
    assert not verdict(
        (0, total("0, 1")), (0, total("0, 2")), (1, total("0, 1")), (2, total("0, 2"))
    )


def test_two_threads_of_a_rank_must_not_share_a_group():
    found = verdict((0, total("0, 1")), (0, total("0, 1")), (1, total("0, 1"), total("0, 1")))
    assert found == "two threads of rank 0 use the same group, of the ranks 0, 1"


def test_ranks_are_shortened():
    assert ranks_text([5]) == "5" and ranks_text([0, 4]) == "0, 4"
    assert ranks_text(range(4)) == "0 to 3" and ranks_text([1, 2, 5]) == "1, 2, 5"
    assert ranks_text([0, 4, 8, 12]) == "0 to 12 in steps of 4"
