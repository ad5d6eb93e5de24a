"""Connections without a token are closed in time, and those that have shown it stay."""

from __future__ import annotations

import asyncio

from flowgrpo_rc.rewards.http.door import Door


class Connection(asyncio.Transport):
    """A connection that notes when it is closed."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door
        self.closed = False

    def abort(self) -> None:
        self.closed = True
        self._door.leave(self)


def test_a_connection_has_a_deadline_until_it_is_let_in() -> None:
    async def run() -> tuple[bool, bool]:
        door = Door(deadline_s=0.05)
        stranger, guest = Connection(door), Connection(door)
        for each in (stranger, guest):
            door.knock(each)
        door.leave(guest)
        await asyncio.sleep(0.2)
        return stranger.closed, guest.closed

    assert asyncio.run(run()) == (True, False)


def test_a_new_connection_takes_the_place_of_the_oldest() -> None:
    async def run() -> list[bool]:
        door = Door(deadline_s=60, most=2)
        connections = [Connection(door) for _ in range(5)]
        door.knock(connections[0])
        door.leave(connections[0])
        for each in connections[1:]:
            door.knock(each)
        return [each.closed for each in connections]

    assert asyncio.run(run()) == [False, True, True, False, False]
