"""Rings of ranks that wait for one another.

Schedules on paper, pictures of waits, and reports on ranks that hang are searched for them.
"""

from collections.abc import Collection, Mapping


def find_cycle(waits: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """Return the first ring of ranks in which each waits for the next, or ``()``.

    Args:
        waits: {waiting rank: ranks it waits for}, searched in this order.
    """
    dead_ends: set[int] = set()

    def walk(path: tuple[int, ...]) -> tuple[int, ...]:
        for peer in waits[path[-1]]:
            if peer in path:
                return path[path.index(peer) :]
            if peer in waits and peer not in dead_ends and (found := walk((*path, peer))):
                return found
        # Without this the walk would try every path, and their number doubles with each rank.
        dead_ends.add(path[-1])
        return ()

    return next((ring for rank in waits if (ring := walk((rank,)))), ())
