"""The results of a validation and of a benchmark: data, a page, and the files of both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha_deploy.output import is_junit, write_file
from mha_deploy.report import SavableResult
from mha_deploy.status import Finding, Outcome, Severity

if TYPE_CHECKING:
    from mha_deploy.validation import verdict
    from mha_deploy.validation.bench import ModelBench
    from mha_deploy.validation.records import ReportRecord

StrPath = str | os.PathLike[str]


class Report(SavableResult):
    """The result of a validation; a notebook shows it as a page.

    Args:
        validation: What was run and found; its `record` is what is stored.
    """

    def __init__(self, validation: verdict.Validation) -> None:
        self.validation = validation

        self.outcome: Outcome = validation.outcome
        """`passed`; `failed`; or `not verified`: nothing failed, but an engine of the bundle was not run, or
        an output shows nothing."""
        self.passed: bool = validation.passed
        """Whether the outcome is `passed`; false where it is `not verified`."""
        self.headline: str = validation.headline
        """The verdict in one line."""
        self.findings: tuple[Finding, ...] = validation.findings
        """What is wrong, not covered, or worth knowing: each with `level`, `kind`, place and text."""

    @cached_property
    def record(self) -> ReportRecord:
        """What is stored, as a record: its fields are those of `report.json`."""
        return self.validation.record  # with the time and the machine: the same every time

    def _stored(self) -> dict[str, Any]:
        from mha_deploy.validation.records import plain_report

        return plain_report(self.record)

    def to_html(self) -> str:
        """A self-contained HTML page."""
        from mha_deploy.report.page import report_page

        return report_page(self.to_dict())

    def to_junit(self) -> str:
        """JUnit XML: a test case for every output that was judged, and one for the verdict."""
        from mha_deploy.report.page import JUnitTest, junit
        from mha_deploy.text import runtime_text

        record = self.record
        results = [
            JUnitTest(
                (record.model.name, f"{runtime_text(run.runtime, run.clients)}, {run.cases}"),
                f"{each.case}/{each.output}",
                each.outcome,
                each.problem or "",
            )
            for run in record.parity
            for each in run.verdicts
        ]
        failures = [f"- {each.text}" for each in self.findings if each.level is Severity.FAILURE]
        words = "\n".join([self.headline, *failures])
        return junit("validate", [*results, JUnitTest((record.model.name,), "verdict", self.outcome, words)])

    def save_junit(self, path: StrPath, *, overwrite: bool = False) -> Path:
        """Write the JUnit XML to a file, and give its path; one of this tool is replaced.

        Args:
            path: The file.
            overwrite: Replace any other file, too.
        """
        return write_file(Path(path), self.to_junit().encode(), is_junit, overwrite=overwrite)

    def save(self, folder: StrPath, *, overwrite: bool = False) -> Path:
        """Write `report.json` and `report.html` into a folder; returns the path of the page.

        Args:
            folder: The folder, which is made if need be.
            overwrite: Replace files of these names that this tool did not write, too.
        """
        from mha_deploy.bundle.samples import write_sample

        for name, sample in self.validation.kept.items():
            write_sample(Path(folder) / name, sample, within=Path(folder), overwrite=overwrite)
        return self._save(Path(folder), "report", overwrite=overwrite)

    def __repr__(self) -> str:
        return f"<Report {self.outcome}: {self.headline}>"


class BenchReport(SavableResult):
    """The times of several models.

    Args:
        records: What `bench` returned for each of them.
    """

    def __init__(self, records: Sequence[ModelBench]) -> None:
        self.records = tuple(records)

    @property
    def outcome(self) -> Outcome:
        """Failed where an engine gave a wrong result at any size; not verified where none was run."""
        return Outcome.of(record.outcome for record in self.records)

    @property
    def passed(self) -> bool:
        """Whether engines were timed, and none gave a wrong result at any size."""
        return self.outcome is Outcome.PASSED

    def _stored(self) -> dict[str, Any]:
        from mha_deploy.validation.bench import bench_record
        from mha_deploy.validation.records import plain_bench

        return plain_bench(bench_record(self.records))

    def to_html(self) -> str:
        """A self-contained HTML page."""
        from mha_deploy.report.page import bench_page

        return bench_page(self.to_dict())

    def to_markdown(self) -> str:
        """The times as a Markdown table."""
        from mha_deploy.report.page import bench_markdown

        return bench_markdown(self.to_dict())

    def save(self, folder: StrPath, *, overwrite: bool = False) -> Path:
        """Write `bench.json` and `bench.html` into a folder; returns the path of the page.

        Args:
            folder: The folder, which is made if need be.
            overwrite: Replace files of these names that this tool did not write, too.
        """
        return self._save(Path(folder), "bench", overwrite=overwrite)

    def record(self, path: StrPath, command: Sequence[str] | None = None) -> None:
        """Add every measurement as a line of JSON to a file, with its samples and what it was measured with.

        Args:
            path: The file.
            command: The command that made it; default: that of this process.
        """
        from mha_deploy.regression.record import append_lines, bench_lines

        append_lines(Path(path), bench_lines(self.records, command))
