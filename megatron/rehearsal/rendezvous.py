"""Check that the collectives and messages of all ranks match, and that no rank waits forever.

Each collective or message is a rendezvous of ranks.
A rank waits in a collective until all ranks of the group have called the collective. A sender waits
until the other rank receives, and a receiver waits until the other rank sends. Some backends are
less strict, because they buffer short messages. A job that passes this test does not depend on such
buffers. Ranks may call operations of different groups in any order that causes no deadlock.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.rehearsal.event_log import MESSAGES, Event, ranks_text

COMPARED = {"send": (3,), "recv": (3,), "broadcast": range(4), "gather": range(3)}
"""The indices of the fields of `Event` that must be equal for events to match.

For other collectives, all fields must be equal. In a broadcast, the line of code may differ between
the root and the other ranks.
"""


@dataclass(eq=False)
class Strand:
    """One thread of one rank, with the collectives, sends and receives of the thread.

    Attributes:
        events: The events of the thread, in order.
        end: A text about how the rank ended, such as "fails", for error messages.
        done: The number of events that are already matched with events of other ranks.
    """

    rank: int
    events: Sequence[Event]
    end: str = "has ended"
    done: int = 0

    @property
    def event(self) -> Event | None:
        """The first event that is not matched yet, or None if all events are matched."""
        return self.events[self.done] if self.done < len(self.events) else None


def unmatched(strands: Sequence[Strand], members: Mapping[str, Sequence[int]]) -> str:
    """Return an error text if an event has no matching event on another rank, otherwise "".

    It is also an error if two threads of a rank use the same process group, because the order of
    their events is then undefined.

    Args:
        strands: Every thread of every rank.
        members: Maps the text of a process group, such as "0 to 3", to the group's ranks.
    """
    users: dict[tuple[int, str], Strand] = {}
    for strand, group in ((each, event.group) for each in strands for event in each.events):
        if users.setdefault((strand.rank, group), strand) is not strand:
            return f"two threads of rank {strand.rank} use the same group, of the ranks {group}"
    waiting: dict[tuple, dict[int, deque[Strand]]] = defaultdict(lambda: defaultdict(deque))
    ready = deque(strands)
    while ready:
        strand = ready.popleft()
        event = strand.event
        if event is None:
            continue
        place, partners = _place(event, strand.rank, members)
        there = waiting[place]
        there[strand.rank].append(strand)
        if not all(there[rank] for rank in partners):
            continue
        met = [there[rank].popleft() for rank in partners]
        if problem := _difference(met):
            return problem
        for each in met:
            each.done += 1
        ready.extend(met)
    return _stalled(strands) if any(each.event for each in strands) else ""


def _place(
    event: Event, rank: int, members: Mapping[str, Sequence[int]]
) -> tuple[tuple, Sequence[int]]:
    """Return (key, ranks) of an event of the rank `rank`.

    Events that match each other have the same key. `ranks` are the ranks that must call them.
    """
    if event.op not in MESSAGES:
        return (event.group,), members[event.group]
    assert event.peer is not None
    ends = (rank, event.peer) if event.op == "send" else (event.peer, rank)
    return (event.group, ends), ends


def _difference(met: Iterable[Strand]) -> str:
    """Return an error text if the next events of the strands `met` do not match, otherwise "".

    The text lists these events.
    """
    kinds: dict[tuple, list[tuple[int, Event]]] = defaultdict(list)
    for strand in met:
        event = strand.event
        assert event is not None
        kind = tuple(event[field] for field in COMPARED.get(event.op, range(len(event))))
        kinds[kind].append((strand.rank, event))
    if len(kinds) == 1:
        return ""
    lines = ["ranks meet in operations that do not fit together:"]
    lines += [f"  {_ranks([r for r, _ in same])}: {_text(same[0][1])}" for same in kinds.values()]
    return "\n".join(lines)


def _stalled(strands: Sequence[Strand]) -> str:
    """Return an error text that lists the waiting ranks, and the last event of each ended rank."""
    waiting = {strand.rank for strand in strands if strand.event}
    found: dict[str, list[int]] = defaultdict(list)
    for strand in sorted(strands, key=lambda each: each.event is None):
        if event := strand.event:
            found[f"waits in {_text(event)}"].append(strand.rank)
        elif strand.rank not in waiting:
            after = f" after {_text(strand.events[-1])}" if strand.events else ""
            found[f"{strand.end}{after}"].append(strand.rank)
    lines = (f"  {_ranks(ranks)} {what}" for what, ranks in found.items())
    return "\n".join(["ranks wait for ever:", *lines])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {ranks_text(ranks)}"


def _text(event: Event) -> str:
    ends = {"send": f" to rank {event.peer}", "recv": f" from rank {event.peer}"}
    over = f" over the ranks {event.group}" if event.op not in MESSAGES else ""
    root = f" from rank {event.peer}" if event.op == "broadcast" else ""
    what = f" of {event.what}" if event.what else ""
    return f"{event.op}{ends.get(event.op, root)}{what}{over} ({event.where})"
