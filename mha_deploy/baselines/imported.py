"""Cases of a model that was imported, from the very file that it came from: without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mha_deploy.bundle.cases import DecodeTrace, GoldenCase, PlannedTrace
from mha_deploy.bundle.folder import SOURCE, Bundle, sha256
from mha_deploy.bundle.samples import Sample
from mha_deploy.bundle.sizes import PlannedCase, sizes_name
from mha_deploy.errors import DeployError, NoResult
from mha_deploy.exporter.onnx_import import OnnxSource


class FileCases:
    """Makes cases for a bundle that was imported, from inputs of a user's own and the very file it came from.

    Args:
        bundle: The bundle.
        source: The file; its hash must be that of the bundle.
    """

    def __init__(self, bundle: Bundle, source: Path | None) -> None:
        spec, wanted = bundle.manifest.spec, bundle.manifest.spec.state_sha256
        hint = f"--source FILE.onnx, the file that {spec.name} was imported from"
        if source is None and SOURCE in bundle.manifest.files:  # of a compressed model
            source = bundle.file(SOURCE)
        if source is None:
            what = "The reference of an imported model is its ONNX file, which the bundle does not hold."
            without = "or do without --fresh, --steps and --data, also in mha-deploy.toml"
            raise DeployError(what, got=spec.summary, hint=f"{hint}; {without}")
        if not source.is_file():
            raise DeployError("There is no such file.", got=source, hint=hint)
        if (found := sha256(source)) != wanted:
            what, got = "This is not the file that was imported.", f"{source}: SHA-256 {found[:16]}…"
            raise DeployError(what, got=f"{got}, not {wanted[:16]}…", hint=hint)
        self._source = OnnxSource.reopened(source, bundle.manifest)
        self._spec, tensors = spec, (*spec.inputs, *spec.outputs)
        self._types = {each.name: bundle.manifest.precision.numpy_of(each.kind) for each in tensors}

    def trace(self, planned: PlannedTrace, seed: int) -> DecodeTrace:
        """What decoding must give, of tokens that are drawn."""
        self._source.options = replace(self._source.options, seed=seed)
        with closing(self._source):
            return self._source.trace_of(self._spec, planned, self._types)

    def fresh(self, sizes: Mapping[str, int], *, seed: int) -> GoldenCase:
        """What is true of inputs that are drawn; the same seed at the same sizes draws the same."""
        self._source.options = replace(self._source.options, seed=seed)
        name = f"fresh-{sizes_name(sizes)}-seed{seed}"
        planned = PlannedCase(name=name, sizes=dict(sizes))
        try:
            return self._source.moderate_case(planned, self._types)
        except NoResult:
            if not self._source.choose_masks():
                raise
            return self._source.moderate_case(planned, self._types)

    def case(self, sample: Sample) -> GoldenCase:
        """What is true of a sample."""
        own = self._source.file_types()
        drawn = {name: array.astype(own[name]) for name, array in sample.inputs.items()}
        return self._source.case_of(sample.name, sample.sizes, drawn, self._types)
