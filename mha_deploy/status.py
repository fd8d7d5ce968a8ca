"""What a check came to, and why, as data: outcomes, severities, kinds of reasons, and findings.

Nothing here is a sentence: `mha_deploy.text` writes those, for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from mha_deploy.errors import EXIT_PASSED, EXIT_VERDICT_FAILED


def means(meaning: str) -> Meta:
    """What a field of a record means: docs/report.md is written from it."""
    return Meta(description=meaning)


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

        Of no check at all, nothing is verified. So leaving checks out never makes another outcome passed.
        """
        found = set(parts)
        if cls.FAILED in found:
            return cls.FAILED
        return cls.PASSED if found == {cls.PASSED} else cls.NOT_VERIFIED

    @classmethod
    def passing(cls, is_right: bool) -> Outcome:
        """Passed or failed."""
        return cls.PASSED if is_right else cls.FAILED

    @property
    def exit_code(self) -> int:
        """That of a command; what is not verified fails only where it was required."""
        return EXIT_VERDICT_FAILED if self is Outcome.FAILED else EXIT_PASSED


class CellStatus(Word):
    """What became of a cell of a matrix: the outcome of its validation, or why there is none."""

    PASSED = "passed"
    NOT_VERIFIED = "not verified"  # built and not run, or run without a verdict
    FAILED = "failed"  # the export, or what the engine computes
    REFUSED = "refused"  # by the runtime
    CRASHED = "crashed"
    UNAVAILABLE = "unavailable"  # the runtime, the GPU, or the model

    @property
    def outcome(self) -> Outcome:
        """What has no engine to judge has failed."""
        return next((each for each in Outcome if each.value == self.value), Outcome.FAILED)


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
    DID_NOT_BUILD = "did not build"
    DID_NOT_CLOSE = "did not close"
    NO_REFERENCE = "no reference"
    BEYOND_TYPE = "beyond type"
    # One output of one case shows nothing
    ORACLE_ZERO = "oracle zero"
    ORACLE_SUBNORMAL = "oracle subnormal"
    MODULE_ZERO = "module zero"
    ORACLE_CONSTANT = "oracle constant"
    ORACLE_REPEATS = "oracle repeats"
    ORACLE_OF_ONE_KEY = "oracle of one key"
    # A runtime, an engine or a server
    WRONG_OUTPUTS = "wrong outputs"
    UNVERIFIED_OUTPUTS = "unverified outputs"
    NOT_DECODED = "not decoded"
    WRONG_DECODING = "wrong decoding"
    UNVERIFIED_DECODING = "unverified decoding"
    NOT_INVARIANT = "not invariant"
    RUNTIME_FAILED = "runtime failed"
    NO_ENGINE = "no engine"
    ENGINE_NOT_BUILT = "engine not built"
    ENGINE_GONE = "engine gone"
    ENGINE_NOT_RUN = "engine not run"
    ENGINE_NOT_CONFIRMED = "engine not confirmed"
    FOREIGN_ENGINE = "foreign engine"
    OUTPUTS_NOT_JUDGED = "outputs not judged"
    ATTENTION_CHANGED = "attention changed"
    OTHER_WEIGHTS = "other weights"
    WEIGHTS_CHANGED = "weights changed"
    LOSS = "loss"
    WRONG_ON_DATA = "wrong on data"
    DATA_NOT_VERIFIED = "data not verified"
    DATA_OUTSIDE = "data outside"
    DEMAND_NOT_MET = "demand not met"
    DEMAND_NOT_CHECKED = "demand not checked"
    OTHER_BUNDLE = "other bundle"
    RANGE_SHRUNK = "range shrunk"
    GRAPH_NOT_FUSED = "graph not fused"
    ENGINE_NOT_FUSED = "engine not fused"
    ENGINE_PRECISION = "engine precision"
    TYPE_NOT_RECORDED = "type not recorded"
    OUTSIDE_PROFILES = "outside profiles"
    FAULT = "fault"
    FP16_RANGE = "fp16 range"
    WRONG_MASK = "wrong mask"
    SLOWER = "slower"
    NOT_SETTLED = "not settled"
    REQUESTS_FAILED = "requests failed"
    REQUESTS_NOT_SENT = "requests not sent"
    # What nothing was judged on
    NOT_RUN = "not run"
    NOT_COVERED = "not covered"
    STEPS_NOT_COVERED = "steps not covered"
    PROFILE_NOT_COVERED = "profile not covered"
    SIZES_NOT_COVERED = "sizes not covered"
    ATTENTION_NOT_OBSERVED = "attention not observed"
    PROBES_NOT_RUN = "probes not run"
    # A self-test
    HIDDEN_BY_ROUNDING = "hidden by rounding"
    NOTHING_TO_MUTATE = "nothing to mutate"
    # A time
    WRONG_RESULT = "wrong result"
    WRONG_WHEN_TIMED = "wrong when timed"
    WRONG_ON_STREAMS = "wrong on streams"
    NOT_TIMED = "not timed"
    # A search
    REFERENCE_IS_SUBJECT = "reference is subject"
    MODULE_NOT_USED = "module not used"


class EvidenceSource(Word):
    """What reports the kernels of an engine, or what became of an attention."""

    LOG = "log"  # of the build
    PLAN = "plan"
    INSPECTOR = "inspector"
    GRAPH = "graph"  # the attention is no node of it


class ReasonKind(Word):
    """Why a verdict on an engine is what it is."""

    # No evidence.
    NO_SOURCE = "no source"
    NO_KERNELS = "no kernels of the profile"
    HIDDEN_REGION = "hidden region"
    NOT_NAMED = "not named"
    NO_GRAPH = "no graph"
    # Evidence that proves nothing.
    NO_COMPUTING_KERNEL = "no computing kernel"
    NAMELESS_FUSED = "fused kernel without a node"
    PARTIAL_FUSED = "fused kernel with a part of the attention"
    OTHER_ATTENTION = "fused kernel of another attention"
    FOREIGN_PLUGIN = "foreign plugin"
    # Evidence against what looks right.
    COMPUTED_APART = "a part is computed apart"
    STRAY_SOFTMAX = "softmax of no known node"
    STRAY_MATMUL = "matmul of no known node"
    COUNT_DIFFERS = "count differs"
    SOURCES_DISAGREE = "sources disagree"
    # Fused, but the work is done twice.
    SCORES_AGAIN = "scores computed again"
    # Evidence without names of nodes, or from the graph.
    COUNTED = "counted"
    NOT_ONE_NODE = "not one node"
    # Of the precision.
    UNTYPED = "types not reported"
    NOTHING_FLOATING = "no floating-point tensor"
    MAY_BE_MATMUL = "may be a matmul"
    MATMUL_NOT_REPORTED = "matmul not reported"
    COMPUTE_TYPE = "computed type not reported"
    OTHER_TYPE = "another type"
    # An engine on disk, whose manifest claims more than its plan shows.
    PLAN_DIFFERS = "plan differs"
    OTHER_WEIGHTS = "other weights"
    PLAN_UNREADABLE = "plan unreadable"


class CaseKind(Word):
    """Where cases come from."""

    GOLDEN = "golden"
    FRESH = "fresh"
    SWEEP = "sweep"
    PROBE = "probe"
    LAYERS = "layers"  # the results of single attentions, beside those of a whole model
    SERVED = "served"


class Variation(Word):
    """What a check of invariance varies."""

    SLOTS = "slots"  # where in the batch an element is
    NEIGHBORS = "neighbors"  # what the other elements of the batch are
    BATCH = "batch"  # how many there are
    PROFILES = "profiles"


class Obstacle(Word):
    """Why nothing could be varied."""

    NO_BATCH_AXIS = "no batch axis"
    ONE_ELEMENT = "one element"
    NO_OTHER_BATCH = "no other batch"
    FIXED_BATCH = "fixed batch"
    ONE_PROFILE = "one profile"
    NO_PROFILES = "no profiles"


class Section(Word):
    """The part of a report that has the evidence of a finding."""

    PARITY = "parity"
    DECODE = "decode"
    FUSION = "fusion"
    PRECISION = "precision"
    LATENCY = "latency"
    RANGE = "range"
    INVARIANCE = "invariance"
    CONFORMANCE = "conformance"
    ENGINE = "engine"
    COVERAGE = "coverage"
    SERVING = "serving"
    DATA = "data"
    REQUIREMENTS = "requirements"
    LOSS = "loss"


EMPTY_ORACLE = frozenset({Kind.ORACLE_ZERO, Kind.ORACLE_CONSTANT, Kind.ORACLE_OF_ONE_KEY})
"""An output of which another case may show more."""


class Reason(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why something failed, is not verified, or was not done."""

    kind: Annotated[
        Kind,
        means(
            "what is wrong, a value of `mha_deploy.status.Kind`: `out of budget`, `not finite`, "
            "`did not run`, `oracle zero`, …"
        ),
    ]
    got: Annotated[str | None, means("what was found, or what another program reported")] = None
    wanted: Annotated[str | None, means("what it should have been")] = None
    names: Annotated[
        tuple[str, ...],
        means("the measures out of budget; the mask that explains NaN; the axes that may count one key"),
    ] = ()
    where: Annotated[str | None, means("the worst slice of the tensor")] = None
    worst: Annotated[str | None, means("the place of the largest error, where it was looked for")] = None
    index: Annotated[tuple[int, ...] | None, means("an element of the tensor")] = None
    numbers: Annotated[Mapping[str, float], means("counts and figures by name")] = {}


AxisEnd = Literal["min", "max"]


class Gap(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was not judged: an engine, an attention, decode steps, a profile, probes, or sizes."""

    kind: Annotated[
        Kind,
        means(
            "`not run` (an engine), `steps not covered`, `profile not covered`, `sizes not "
            "covered`, `attention not observed`, `outputs not judged` or `probes not run`"
        ),
    ]
    name: Annotated[str, means("the engine or the runtime; omitted if one range holds for all")] = ""
    profile: Annotated[int | None, means("the profile")] = None
    axis: Annotated[str | None, means("the axis whose sizes were not run")] = None
    least: Annotated[int | None, means("the first size that was not run")] = None
    most: Annotated[int | None, means("the last one")] = None
    end: Annotated[AxisEnd, means("the end of the axis that these sizes reach to; omitted for `max`")] = "max"
    # A second axis, where only the combination of both was not run: each of these with each of the first
    other_axis: Annotated[
        str | None,
        means("a second axis, where only the combinations of these sizes with its sizes were not run"),
    ] = None
    other_least: Annotated[int | None, means("the first size of the second axis")] = None
    other_most: Annotated[int | None, means("the last one")] = None
    other_end: Annotated[AxisEnd, means("the end of the second axis that they reach to")] = "max"
    attention: Annotated[
        str | None, means("the attention that no output shows, and that was not judged by its own result")
    ] = None
    hidden: Annotated[
        tuple[str, ...], means("the mistakes in that attention that no output shows; omitted if not tried")
    ] = ()
    text: Annotated[str, means("the same in words, for people")] = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """What it is about, whatever its extent."""
        sizes = (self.axis, self.end, self.other_axis, self.other_end)
        return self.kind, self.name, self.profile, *sizes, self.attention

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The first and the last size that were not run, by axis; without an axis all sizes."""
        axes = ((self.axis, self.least, self.most), (self.other_axis, self.other_least, self.other_most))
        return {
            axis or "": (least, most) for axis, least, most in axes if least is not None and most is not None
        }

    @property
    def extent(self) -> int:
        """How many sizes, or combinations of two, were not run."""
        return math.prod(most - least + 1 for least, most in self.spans.values())

    def meets(self, other: Gap) -> bool:
        """Whether both are about sizes, and some of them are in both."""
        places = ((self.name, other.name), (self.profile, other.profile))
        one, two = self.spans, other.spans
        return (
            {self.kind, other.kind} <= {Kind.SIZES_NOT_COVERED, Kind.PROFILE_NOT_COVERED}
            and all(a == b or a in ("", None) or b in ("", None) for a, b in places)
            and all(
                max(one[axis][0], two[axis][0]) <= min(one[axis][1], two[axis][1])
                for axis in one.keys() & two.keys()
            )
        )

    def is_within(self, other: Gap) -> bool:
        """Whether all sizes of this one are in the other, too."""
        own = self.spans
        is_there = other.name in ("", self.name) and other.profile in (None, self.profile)
        return (
            is_there
            and self.meets(other)
            and all(
                axis in own and least <= own[axis][0] and own[axis][1] <= most
                for axis, (least, most) in other.spans.items()
            )
        )


class Place(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a finding is about; what does not apply is null."""

    runner: Annotated[str | None, means("the runtime or server, with its version")] = None
    engine: Annotated[str | None, means("name of the engine")] = None
    cases: Annotated[tuple[CaseKind, ...], means("the kinds of cases, as in `parity`")] = ()
    case: Annotated[str | None, means("name of the case")] = None
    output: Annotated[str | None, means("name of the output, or of the attention")] = None
    check: Annotated[str | None, means("the check of `invariance`, or the mask of `conformance`")] = None
    sizes: Annotated[Mapping[str, int] | None, means("axis sizes")] = None
    clients: Annotated[
        tuple[int, ...], means("the numbers of clients at which a server did so, as in `serving`")
    ] = ()


class Finding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that is wrong, not covered, or worth knowing."""

    level: Annotated[Severity, means("its severity")]
    section: Annotated[Section, means("the part of the report that has the evidence: `parity`, `decode`, …")]
    kind: Annotated[
        Kind,
        means("what was found, a value of `mha_deploy.status.Kind`: `wrong outputs`, `engine not run`, …"),
    ]
    place: Annotated[Place, means("what it is about")] = Place()
    reason: Annotated[Reason | None, means("the reason, or the first of several; null if there is none")] = (
        None
    )
    names: Annotated[tuple[str, ...], means("the nodes, cases or sizes that it is about")] = ()
    numbers: Annotated[Mapping[str, float], means("counts and figures by name")] = {}
    detail: Annotated[str, means("what another part of the report, or another program, reports about it")] = (
        ""
    )
    required_by: Annotated[
        tuple[str, ...],
        means(
            "the requirements without which it would be no failure: `require_run`, …; empty if it always is"
        ),
    ] = ()
    in_headline: Annotated[
        bool, means("whether the headline already contains it, so that it is shown only once")
    ] = False
    text: Annotated[str, means("the same in a sentence, for people")] = ""


def derive(record: Struct, **fields: object) -> None:
    """Set fields that follow from others, for `__post_init__`: whatever a file claims, they are computed."""
    for name, value in fields.items():
        msgspec.structs.force_setattr(record, name, value)
