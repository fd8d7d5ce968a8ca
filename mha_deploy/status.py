"""What a check came to, and why, as data: outcomes, severities, kinds of reasons, and findings.

Nothing here is a sentence: `mha_deploy.text` writes those, for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec
from msgspec import Struct

from mha_deploy.errors import EXIT_PASSED, EXIT_VERDICT_FAILED


class Word(str, Enum):
    """An enumeration whose members are written as their values."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class Outcome(Word):
    """What a check came to; there is no fourth."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_VERIFIED = "not verified"

    @classmethod
    def of(cls, parts: Iterable[Outcome]) -> Outcome:
        """The outcome of several checks: a failure outweighs what is not verified, and that what passed.

        Of no check at all, nothing is verified. So leaving checks out never turns another outcome to passed.
        """
        found = set(parts)
        if cls.FAILED in found:
            return cls.FAILED
        return cls.PASSED if found == {cls.PASSED} else cls.NOT_VERIFIED

    @property
    def exit_code(self) -> int:
        """That of a command; what is not verified fails only where it was required."""
        return EXIT_VERDICT_FAILED if self is Outcome.FAILED else EXIT_PASSED


class Severity(Word):
    """How much a finding matters; a failure fails the verdict."""

    FAILURE = "failure"
    WARNING = "warning"
    NOTE = "note"


class Kind(Word):
    """What a reason or a finding is about: one for everything that can be wrong, missing or worth knowing."""

    # One output of one case is wrong
    MISSING = "missing"
    UNEXPECTED = "unexpected"
    TYPE = "type"
    SHAPE = "shape"
    NOT_FINITE = "not finite"
    OLD_ENTRIES = "old entries"
    DIFFERENT_VALUES = "different values"
    OUT_OF_BUDGET = "out of budget"
    LENGTHS = "lengths"
    DID_NOT_RUN = "did not run"
    DID_NOT_CLOSE = "did not close"
    # One output of one case shows nothing
    ORACLE_ZERO = "oracle zero"
    ORACLE_SUBNORMAL = "oracle subnormal"
    MODULE_ZERO = "module zero"
    ORACLE_CONSTANT = "oracle constant"
    ORACLE_REPEATS = "oracle repeats"


EMPTY_ORACLE = frozenset({Kind.ORACLE_ZERO, Kind.ORACLE_CONSTANT})
"""An output of which another case may show more."""


class Reason(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why something failed, is not verified, or was not done."""

    kind: Kind  # what it is about
    got: str | None = None  # what was found, or what another program reported
    wanted: str | None = None  # what it should have been
    names: tuple[str, ...] = ()  # measures, nodes, cases or sizes that it is about
    where: str | None = None  # the place inside a tensor, as `batch element 7`
    worst: str | None = None  # where the largest error is, where that was looked for
    index: tuple[int, ...] | None = None  # an element of it
    numbers: Mapping[str, float] = {}  # counts and figures by name


def derive(record: Struct, **fields: object) -> None:
    """Set fields that follow from others, for `__post_init__`: whatever a file claims, they are computed."""
    for name, value in fields.items():
        msgspec.structs.force_setattr(record, name, value)
