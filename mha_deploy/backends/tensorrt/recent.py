"""The things used last, and no more of them than there is room for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Closeable(Protocol):
    """What gives its resources back when it is closed."""

    def close(self) -> None:
        """Give them back."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Closeable)


class Recent(Generic[Key, Value]):
    """Keeps the values used last; closes what it lets go.

    Args:
        most: How many to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key; made if it is not here, after room was made for it."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) >= self._most:
            self._let_go(next(iter(self._kept)))
        value = self._kept[key] = make()
        return value

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Let go of the values whose keys are unwanted."""
        for key in [key for key in self._kept if unwanted(key)]:
            self._let_go(key)

    def close(self) -> None:
        """Let go of everything."""
        self.drop(lambda key: True)

    def __len__(self) -> int:
        return len(self._kept)

    def _let_go(self, key: Key) -> None:
        self._kept.pop(key).close()
