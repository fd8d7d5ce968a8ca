"""Write a bundle as a model of a Triton repository, with a `config.pbtxt` of Triton's own schema."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mha_deploy import __version__
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import MANIFEST, MODEL, Bundle, sha256
from mha_deploy.bundle.sizes import SizeLimit
from mha_deploy.engine.engine import (
    FOLDER,
    Engine,
    build_command,
    manifest_path,
    reasons_not_to_run,
    where_built,
)
from mha_deploy.engine.plugins import library_needed
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, ValidationFailed, nearest
from mha_deploy.files import PathPart, read_json, read_regular
from mha_deploy.graph.rules import TENSORRT_RTX
from mha_deploy.judge import judge_case
from mha_deploy.model.spec import ModelSpec, ModuleSpec, TensorSpec, axes_in
from mha_deploy.options import PackageOptions
from mha_deploy.output import (
    TOOL,
    check_folder,
    copy_file,
    is_mount,
    make_folder,
    names_of,
    put_file,
    rename_to_free,
    replace_keeping,
    temporary_folder,
)
from mha_deploy.requirements import REQUIRED
from mha_deploy.runtime import GPU_RUNNERS, RUNNERS, available_cpu_runtime, open_runner
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.kserve import (
    BUNDLE_PARAMETER,
    INSTALL,
    NAMES,
    RUNS_PARAMETER,
    SEQUENCES_PARAMETER,
    served_name,
)
from mha_deploy.serving.backend import BUNDLE, PLUGINS
from mha_deploy.serving.wheel import wheel_name, write_wheel
from mha_deploy.status import Outcome, Severity
from mha_deploy.validation.invariance import invariance_from_runner
from mha_deploy.validation.records import stored_verdict
from mha_deploy.validation.runtimes import RuntimeFinder

PYTHON, PLAN = "python", "tensorrt_plan"
VARIANTS = (PYTHON, PLAN)
_OWNER = BUNDLE_PARAMETER  # the parameter by which a model of this tool is known
_CONFIG, _FILES = "config.pbtxt", "mha-deploy.json"
_IDLE_US = 60_000_000
_QUICK = SizeLimit(gflop=2.0, gib=0.5)  # of one run, to see whether batch elements are independent
_MODEL_PY = '''"""A bundle of mha-deploy, for the Python backend of Triton."""

from mha_deploy.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_RELEASE = "25.08"  # of the server, where the user names no other
_README = """# {package.name}

{model}, packaged by mha-deploy for Triton's {package.options.variant} backend; it is run by {runtimes}.
All commands are for the folder that holds `{repository}`.

```bash
TRITON={release}    # a release of Triton; {needs}
docker run --rm{gpus} --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 \\
  -v "$PWD/{repository}:/models" nvcr.io/nvidia/tritonserver:${{TRITON}}-py3 \\
  {run}
```

Then, where the bundle is:

```bash
mha-deploy validate {bundle} --url grpc://localhost:8001/{package.name}
```

"""
_WITHOUT_CONTAINER = """Without a container, with PyPI's nvidia-pytriton in a virtual environment:

```bash
pip install nvidia-pytriton "numpy<2" "{repository}/{wheel}"
SERVER=$(python -c "import pytriton, pathlib; print(pathlib.Path(pytriton.__file__).parent / 'tritonserver')")
VERSION=$(python -c "import sys; print('%d.%d' % sys.version_info[:2])")
cp "$SERVER/python_backend_stubs/$VERSION/triton_python_backend_stub" "$SERVER/backends/python/"
export LD_LIBRARY_PATH=$(python -c "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))")
"$SERVER/bin/tritonserver" --model-repository="{repository}" --backend-directory="$SERVER/backends"
```

"""
WHEELS = "wheels"
_SEQUENCES = f"""A request is the prompt or the next tokens of one sequence: batch size 1, correlation ID,
start and end flags. The KV cache stays on the server, and is freed at the end flag, or
after {_IDLE_US // 1_000_000} s without a request.
"""


@dataclass(frozen=True)
class Package:
    """A model in a repository; `command` starts the server.

    `max_batch` is 0 without dynamic batching, and `unbatched` says why; of a model that `decodes` it is the
    number of sequences at a time. `left_out` are the engines of the bundle that are not in it, and why.
    `validated` is the outcome of the bundle's report; None where it has none.
    """

    path: Path
    variant: str
    runtimes: tuple[str, ...]
    max_batch: int
    command: str
    files: tuple[str, ...] = ()
    unbatched: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    decodes: bool = False
    validated: Outcome | None = None


class Packaging:
    """A bundle on its way into a model repository; refused where it cannot be served so."""

    def __init__(self, bundle: Bundle, repository: Path, options: PackageOptions) -> None:
        if not can_import("tritonclient"):
            raise BackendUnavailable("Triton's protobuf schema is not installed.", hint=INSTALL)
        if options.variant not in VARIANTS:
            hint = nearest(options.variant, VARIANTS)
            raise DeployError("There is no such variant.", got=options.variant, hint=hint)
        for what, least in (("instances", 1), ("sequences", 1), ("queue_delay_us", 0), ("max_batch", 1)):
            number = getattr(options, what)
            if number is not None and not least <= number < 2**31:  # as the format of the server has them
                hint = f"from {least} to {2**31 - 1}"
                raise DeployError(
                    f"{what} is too {'small' if number < least else 'large'}.", got=number, hint=hint
                )
        self.bundle, self.repository, self.options = bundle, repository, options
        self.spec: ModelSpec = bundle.manifest.spec
        self.name = options.name or served_name(self.spec.name)
        if re.fullmatch(r"[A-Za-z0-9_.-]+", PathPart(self.name, "a model")) is None:
            hint = "letters, digits and dashes"
            raise DeployError("This cannot be the name of a model.", got=self.name, hint=hint)
        self.validated = self._refuse_failed()
        self.engines, self.runtime = self._choose()
        self.runtimes = (self.runtime,) if self.runtime else tuple(each.path.stem for each in self.engines)
        others = [] if options.runtimes or self.engines else RuntimeFinder(bundle).engines
        self.left_out = {each.path.stem: "; ".join(reasons_not_to_run(each)) for each in others}
        self.on_gpu = bool(self.engines) or self.runtime in GPU_RUNNERS
        if options.variant == PYTHON and bundle.manifest.precision.name == "bf16":
            got, hint = f"{self.spec.name} bf16", "--variant tensorrt_plan, or export in fp16 or fp32"
            raise DeployError("Triton's Python backend has no bfloat16 tensors.", got=got, hint=hint)
        # Raises where a library is missing, or is another version.
        manifests = [each.manifest for each in self.engines]
        needed = {library_needed(record, each.version).path for each in manifests for record in each.plugins}
        self.libraries = sorted(needed)
        if options.variant == PLAN:
            self._refuse_plan()
        self.inputs, self.outputs, self.cache = self.spec.inputs, self.spec.outputs, self.spec.kv_cache
        if (cache := self.cache) is not None:  # it stays on the server, and so do its lengths
            kept = {each.input for each in cache.tensors} | {each.name for each in cache.positions}
            self.inputs = tuple(each for each in self.inputs if each.name not in kept)
            self.outputs = tuple(each for each in self.outputs if each.name in cache.outputs)
        self.batch = self.spec.batch or self.spec.leading
        self.max_batch = self._max_batch()

    # -- what runs it ----------------------------------------------------------------------------

    def _choose(self) -> tuple[list[Engine], str | None]:
        """The engines, or the runtime of the graph."""
        found, wanted = RuntimeFinder(self.bundle).engines, self.options.runtimes
        by_name, is_plan = {engine.path.stem: engine for engine in found}, self.options.variant == PLAN
        unknown = [name for name in wanted if name not in by_name]
        if wanted and not unknown:
            return [by_name[name] for name in dict.fromkeys(wanted)], None
        if len(wanted) == 1 and wanted[0] in RUNNERS:
            if is_plan:
                problem = "A plan is an engine, not a graph in a runtime."
                raise DeployError(problem, got=wanted[0], hint="leave it out")
            return [], wanted[0]
        if unknown:
            hint = nearest(unknown[0], [*by_name, *RUNNERS])
            hint += "; one runtime, or engines" if len(wanted) > 1 else ""
            raise DeployError("The bundle has no engine of that name.", got=unknown[0], hint=hint)
        usable = [
            e for e in found if (e.manifest.backend != TENSORRT_RTX if is_plan else not reasons_not_to_run(e))
        ]
        if is_plan and not usable:
            got = ", ".join(f"{name} ({e.manifest.backend})" for name, e in by_name.items()) or "none"
            hint = f"{build_command(self.bundle.path, '--backend', 'tensorrt')}, or --variant python"
            raise DeployError("The bundle has no TensorRT engine to serve as a plan.", got=got, hint=hint)
        if usable:
            return usable, None
        if find_gpu() is not None and can_import("onnxruntime"):
            return [], "ort-cuda"
        return [], available_cpu_runtime(self.bundle.manifest.precision)

    # -- what cannot be served -------------------------------------------------------------------

    def _refuse_failed(self) -> Outcome | None:
        """The outcome of the bundle's report; refused where it failed."""
        verdict = stored_verdict(self.bundle)
        if verdict is None:
            return None
        if verdict.outcome is Outcome.FAILED and not self.options.allow_failed:
            what, way = "The bundle failed its last validation.", "find the fault, and {} again"
            failures = [each for each in verdict.findings if each.level is Severity.FAILURE]
            if failures and all(each.required_by for each in failures):  # nothing is known to be wrong
                found = dict.fromkeys(name for each in failures for name in each.required_by)
                options = {name: f"--{name.replace('_', '-')}" for name in REQUIRED}
                names = ", ".join(options.get(name, name) for name in found)
                what = f"The last validation of the bundle failed what was required of it: {names}."
                way = f"{{}} where that can be met, or again without {names}"
            again = f"mha-deploy validate {shlex.quote(str(self.bundle.path))}"
            hint = f"{way.format(again)}; --allow-failed packages it anyway"
            raise ValidationFailed(what, got=verdict.headline, hint=hint)
        return verdict.outcome

    def _refuse_plan(self) -> None:
        """What Triton's TensorRT backend cannot serve."""
        spec, python = self.spec, "--variant python"
        if spec.kv_cache is not None:
            got = f"{spec.name}: new entries have to be written at the length of each sequence"
            hint = f"{python}, which keeps it on the server by correlation ID"
            raise DeployError("Triton's TensorRT backend cannot keep this KV cache.", got=got, hint=hint)
        capabilities: dict[str, str] = {}
        for engine in self.engines:
            manifest, name = engine.manifest, engine.path.stem
            if manifest.backend == TENSORRT_RTX:
                problem = "Triton's TensorRT backend loads no engine of TensorRT-RTX."
                raise DeployError(problem, got=name, hint=python)
            wide = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.kind == "int64"]
            if wide and int(manifest.version.split(".")[0]) < 10:
                problem = "Engines before TensorRT 10 have no INT64 tensors, so the plan takes other types."
                got, hint = f"{name}: {', '.join(wide)}", f"{python}, which converts them"
                raise DeployError(problem, got=got, hint=hint)
            capability = (manifest.gpu or {}).get("compute_cap", "")
            if capability in capabilities:
                got = f"{capabilities[capability]} and {name}: {capability}"
                hint = "name one of them with --runtime"
                raise DeployError("Two engines are for the same compute capability.", got=got, hint=hint)
            capabilities[capability] = name
        versions = {engine.manifest.version for engine in self.engines}
        if len(versions) > 1:
            problem = "One server has one TensorRT, and these engines need several."
            raise DeployError(
                problem, got=", ".join(sorted(versions)), hint="build the engines with one version"
            )

    @cached_property
    def _why_dependent(self) -> str | None:
        """Why elements along the axis of the batch may depend on each other; None where they do not.

        Those of a catalog layer are independent by its definition. Of any other model no name tells, so a
        golden case is run in parts, in another order and among other neighbors.
        """
        batch, manifest = self.batch, self.bundle.manifest
        if batch is None or not isinstance(self.spec, ModuleSpec):
            return None
        cases = [each for each in golden_cases(self.bundle) if each.sizes[batch] > 1]
        cases.sort(key=lambda case: sum(array.size for array in case.oracle.values()))
        why = "no golden case has two of them"
        try:
            with open_runner(available_cpu_runtime(manifest.precision), self.bundle.model_path) as runner:
                for case in cases:
                    verdicts = judge_case(case, runner.run(case.inputs), manifest.precision)
                    unjudged = [f"{each.output}: {each.problem}" for each in verdicts if not each.passed]
                    if unjudged:  # a part that differs from this case would show nothing
                        why = f"{case.name}, {unjudged[0]}"
                        continue
                    checks = invariance_from_runner(
                        runner, [case], self.spec, manifest.precision, limit=_QUICK, along=batch
                    )
                    wrong = [f"{each.compared}: {each.problem}" for each in checks if each.problem]
                    if not wrong:
                        return None
                    why = f"{case.name}, {wrong[0]}"
                    break
        except DeployError as error:
            why = error.in_one_line
        return f"elements of axis {batch} are not shown to be independent: {why}"

    def _max_batch(self) -> int:
        """The largest batch that the server may put together; 0 where it must not."""
        most, batch = None, self.batch
        if batch is not None:
            # A request is served by the profile that fits it, so the widest one of an engine counts.
            widest = [max(ranges[batch].max for ranges in each.manifest.ranges) for each in self.engines]
            most = min([self.spec.axes[batch].max, *widest])
        return self._batch_of_requests(most) if self.cache is None else self._batch_of_sequences(most)

    def _batch_of_requests(self, most: int | None) -> int:
        wanted, reason = self.options.max_batch, self._why_unbatched()
        if reason is not None or most is None:
            if wanted is not None and wanted > 0:
                hint = "leave --max-batch out, or export it with a dynamic axis that comes first everywhere"
                raise DeployError("The server cannot batch requests of this model.", got=reason, hint=hint)
            return 0
        if wanted is not None and wanted > most:
            got, hint = f"max_batch {wanted}", f"at most {most}"
            raise DeployError("The model does not take such a batch.", got=got, hint=hint)
        return most if wanted is None else wanted

    def _batch_of_sequences(self, most: int | None) -> int:
        """Of a model with a KV cache: one batch element for every sequence."""
        if self.options.max_batch is not None:
            got = f"max_batch {self.options.max_batch}"
            raise DeployError(
                "A model with a KV cache has a batch of sequences.", got=got, hint="--sequences"
            )
        cached = [] if self.cache is None else [each.output for each in self.cache.tensors]
        served = [tensor.name for tensor in self.outputs]
        lost = [each.name for each in self.spec.outputs if each.name not in (*cached, *served)]
        if lost or not served:
            problem = "A sequence is served by outputs with an entry for each token."
            hint = "return the outputs of all tokens, not only of the last one"
            raise DeployError(problem, got=", ".join(lost) or "no output", hint=hint)
        for tensor in (*self.inputs, *self.outputs):
            if not tensor.dims or tensor.dims[0] not in (self.batch, 1):
                problem = "A sequence is one batch element, and this model has no batch."
                hint = "export it with the batch as the first dimension of every input and output"
                raise DeployError(problem, got=f"{tensor.name}: {tensor.dims}", hint=hint)
        count = self.options.sequences
        if most is not None and count > most and self.engines:
            got = f"{count} sequences, {self.batch} up to {most}"
            hint = f"--sequences {most}, or export with --axis {self.batch}=1:{most}:{count}"
            raise DeployError("The model takes fewer batch elements than sequences.", got=got, hint=hint)
        return count

    def _why_unbatched(self) -> str | None:
        batch = self.batch
        if batch is None:
            first = ", ".join(f"{each.name} {each.dims}" for each in (*self.inputs, *self.outputs))
            return f"no axis comes first in every output: {first}"
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            if not tensor.dims or tensor.dims[0] != batch:
                return f"the first dimension of {tensor.name} is not the batch {batch}: {tensor.dims}"
            if any(batch in axes_in(dim) for dim in tensor.dims[1:]):
                return f"the batch is not only the first dimension of {tensor.name}: {tensor.dims}"
        profiles = [(each, *profile) for each in self.engines for profile in enumerate(each.manifest.ranges)]
        for engine, index, ranges in profiles:
            if ranges[batch].min > 1:
                name = engine.manifest.profile_name(index)
                return f"profile {name} of engine {engine.path.stem} begins with a batch of {ranges[batch]}"
        return self._why_dependent

    # -- what is written -------------------------------------------------------------------------

    def write(self) -> Package:
        """Write a model repository, or add the model to one."""
        place = self.repository / self.name
        self._refuse_occupied(place)
        try:
            make_folder(self.repository, within=self.repository)
            real = self.repository.resolve()
            # Outside the repository, where that is on the same disk: a server that polls it must not load
            # half a model. Inside it, there is no configuration at the top.
            beside = real if is_mount(real) else real.parent
            with temporary_folder(beside / self.name) as folder:
                return self._write(folder / "new", real / self.name)
        except OSError as error:
            problem, hint = "The model repository cannot be written.", "another folder"
            raise DeployError(problem, got=error, hint=hint) from error

    def _write(self, new: Path, place: Path) -> Package:
        """Write the model to a temporary folder and put it in place; what others added there is kept."""
        command = self._command()
        put_file(new / _CONFIG, self._config(new).encode())
        wheel = write_wheel(new / "1" / WHEELS) if self.options.variant == PYTHON else None
        put_file(new / "README.md", self._readme(command, wheel is not None).encode())
        files = sorted(path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file())
        written = {name: sha256(new / name) for name in files}
        tool = {"name": TOOL, "version": __version__}
        put_file(new / _FILES, (json.dumps({"tool": tool, "files": written}, indent=2) + "\n").encode())
        files.append(_FILES)

        def replaced(folder: Path) -> set[str]:
            return _own_files(folder, files)

        if not rename_to_free(new, place):
            self._refuse_occupied(place)
            self._refuse_changed(place, files)
            replace_keeping(new, place, replaced)
        shown = self.repository / self.name
        why = "" if self.max_batch else self._why_unbatched() or ""
        about = (shown, self.options.variant, self.runtimes, self.max_batch, command, tuple(files))
        return Package(
            *about,
            unbatched=why,
            left_out=self.left_out,
            decodes=self.cache is not None,
            validated=self.validated,
        )

    def _refuse_occupied(self, place: Path) -> None:
        if self.repository.exists() and not self.repository.is_dir():
            hint = "--triton FOLDER, which is created if it does not exist"
            raise DeployError("The model repository is not a folder.", got=self.repository, hint=hint)
        if self.repository.resolve().is_relative_to(self.bundle.path.resolve()):
            what = "The model repository would be inside the bundle."
            raise DeployError(what, got=self.repository, hint="--triton FOLDER, elsewhere")
        check_folder(place, within=place.parent)
        if not place.exists() or not any(place.iterdir()):
            return
        try:
            text = read_regular(place / _CONFIG)
        except OSError:
            text = b""
        if _OWNER.encode() not in text:
            problem = "The repository has a folder of that name that mha-deploy did not write."
            raise DeployError(problem, got=place, hint="another --name")
        if not self.options.overwrite:
            hint = "--overwrite, or another --name"
            raise DeployError("The repository has a model of that name.", got=place, hint=hint)

    def _refuse_changed(self, place: Path, new: Sequence[str]) -> None:
        """Refuse to replace a file that somebody changed or added since the model was written."""
        own = _own_files(place, new)
        if theirs := sorted(name for name in new if name not in own and os.path.lexists(place / name)):
            problem = "Files of the model were changed or added since it was written; they would be lost."
            raise DeployError(problem, got=f"{names_of(theirs)} in {place}", hint="move them elsewhere")

    def _config(self, folder: Path) -> str:
        """Write the files of a version, and describe them to Triton."""
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2 as schema

        options, version = self.options, folder / "1"
        config = schema.ModelConfig(name=self.name, max_batch_size=self.max_batch)
        config.input.extend(self._tensor(schema.ModelInput, each) for each in self.inputs)
        config.output.extend(self._tensor(schema.ModelOutput, each) for each in self.outputs)
        config.parameters[_OWNER].string_value = sha256(self.bundle.path / MANIFEST)
        group = config.instance_group.add(count=options.instances)
        group.kind = group.KIND_GPU if self.on_gpu else group.KIND_CPU
        config.parameters[RUNS_PARAMETER].string_value = json.dumps(self.runtimes)
        if options.variant == PLAN:
            config.platform, config.backend = PLAN, "tensorrt"
            self._add_plans(config, version, group)
        else:
            config.backend = PYTHON
            self._copy_bundle(version)
        for library in self.libraries:
            copy_file(library, version / PLUGINS / library.name)
        if self.cache is not None:
            config.parameters[SEQUENCES_PARAMETER].string_value = str(options.sequences)
            batching = config.sequence_batching
            batching.max_sequence_idle_microseconds = _IDLE_US
            batching.oldest.max_candidate_sequences = options.sequences
            batching.oldest.max_queue_delay_microseconds = options.queue_delay_us
        else:
            if self.max_batch > 1:
                config.dynamic_batching.max_queue_delay_microseconds = options.queue_delay_us
            self._add_warmup(config, folder)
        text = text_format.MessageToString(config)
        if text_format.Parse(text, schema.ModelConfig()) != config:  # what Triton's schema does not take
            raise DeployError(
                "The configuration cannot be written as text.",
                got=text,
                hint="names without control characters",
            )
        return text

    def _tensor(self, kind: Any, tensor: TensorSpec) -> Any:
        dtype = self.bundle.manifest.precision.numpy_of(tensor.kind)
        dims = tensor.dims[1:] if self.max_batch else tensor.dims
        found = kind(name=tensor.name, data_type=_type_name(dtype))
        found.dims.extend(dim if isinstance(dim, int) else -1 for dim in dims or (1,))
        if not dims:  # Triton has no tensor without dimensions: clients send [B, 1], the model gets [B]
            found.reshape.SetInParent()
        return found

    def _copy_bundle(self, version: Path) -> None:
        source, target = self.bundle.path, version / BUNDLE
        put_file(version / "model.py", _MODEL_PY.encode())
        copy_file(source / MANIFEST, target / MANIFEST)
        # The verdict of a TensorRT-RTX engine is compared with the graph; any other engine needs none.
        if not self.engines or any(engine.manifest.backend == TENSORRT_RTX for engine in self.engines):
            for name in self.bundle.manifest.files:
                if name.startswith(MODEL):
                    copy_file(self.bundle.file(name), target / name)
        for engine in self.engines:
            for path in (engine.path, manifest_path(engine.path)):
                copy_file(path, target / FOLDER / path.name)

    def _add_plans(self, config: Any, version: Path, group: Any) -> None:
        """One plan for every compute capability, and every profile of it."""
        for index, engine in enumerate(self.engines):
            name = "model.plan" if len(self.engines) == 1 else f"{engine.path.stem}.plan"
            copy_file(engine.path, version / name)
            if index == 0:
                config.default_model_filename = name
            if len(self.engines) > 1 and engine.manifest.gpu is not None:
                config.cc_model_filenames[engine.manifest.gpu["compute_cap"]] = name
        profiles = min(len(engine.manifest.profiles) for engine in self.engines)
        if profiles > 1:
            group.profile.extend(str(index) for index in range(profiles))

    def _add_warmup(self, config: Any, folder: Path) -> None:
        """The smallest and the usual golden case, so that no client waits for the first call."""
        from tritonclient.grpc import model_config_pb2 as schema

        def admits(engine: Engine, sizes: Mapping[str, int]) -> bool:
            """Whether one of its profiles, which may be narrower than the axes, takes these sizes."""
            profiles = (profile.items() for profile in engine.manifest.ranges)
            return any(all(axis.min <= sizes[name] <= axis.max for name, axis in each) for each in profiles)

        for case in golden_cases(self.bundle):
            if case.name not in ("min", "opt") or not all(admits(each, case.sizes) for each in self.engines):
                continue
            warmup = config.model_warmup.add(name=case.name, batch_size=1)
            if self.max_batch and self.batch is not None:  # the server repeats one batch element
                warmup.batch_size = min(case.sizes[self.batch], self.max_batch)
            for index, tensor in enumerate(self.spec.inputs):
                array = np.ascontiguousarray(case.inputs[tensor.name][: 1 if self.max_batch else None])
                file = f"{case.name}-{index}"  # a name of a tensor may be no name of a file
                put_file(folder / "warmup" / file, array.tobytes())
                entry = warmup.inputs[tensor.name]
                entry.data_type = schema.DataType.Value(_type_name(array.dtype))
                entry.dims.extend((array.shape[1:] if self.max_batch else array.shape) or (1,))
                entry.input_data_file = file

    # -- how it is started -----------------------------------------------------------------------

    def _command(self) -> str:
        flags, is_plan = ["tritonserver", "--model-repository=/models"], self.options.variant == PLAN
        if is_plan and self.libraries:
            places = [f"/models/{self.name}/1/{PLUGINS}/{library.name}" for library in self.libraries]
            flags.append(f"--backend-config=tensorrt,plugins={';'.join(places)}")
        if is_plan and any(engine.manifest.options.get("version_compatible") for engine in self.engines):
            flags.append("--backend-config=tensorrt,version-compatible=true")
        return " ".join(f"'{flag}'" if ";" in flag else flag for flag in flags)

    def _readme(self, command: str, has_wheel: bool) -> str:
        versions, of_rtx = (
            sorted(
                {
                    each.manifest.version
                    for each in self.engines
                    if (each.manifest.backend == TENSORRT_RTX) is rtx
                }
            )
            for rtx in (False, True)
        )
        extra = {"ort-cpu": "[ort]", "ort-cuda": "[ort-gpu]", "ort-cuda-contrib": "[ort-gpu]"}
        extras = extra.get(self.runtime or "", "[cuda]" if self.engines else "")
        wheel = f"{self.name}/1/{WHEELS}/{wheel_name()}{extras}"
        install = f'pip install "{f"/models/{wheel}" if has_wheel else f"mha-deploy{extras}"}"'
        # No release of the server has TensorRT-RTX inside; an engine is for one version of it.
        install += "".join(f' "tensorrt-rtx-cu13=={version}"' for version in of_rtx)
        needs = [f"TensorRT {version}" for version in versions] + ["CUDA 13"] * bool(of_rtx)
        folder, repository = os.path.split(os.path.abspath(self.repository))
        text = _README.format(
            package=self,
            repository=repository,
            model=f"{self.spec.name} {self.bundle.manifest.precision.name}",
            runtimes=", ".join(self.runtimes),
            bundle=shlex.quote(os.path.relpath(self.bundle.path, folder)),
            release=_RELEASE,
            needs=f"change it to one with {' and '.join(needs)} inside" if needs else "any other will do",
            gpus=" --gpus all" if self.on_gpu else "",
            run=command if self.options.variant == PLAN else f"bash -c '{install} && {command}'",
        )
        if has_wheel and not self.on_gpu:
            text += _WITHOUT_CONTAINER.format(repository=repository, wheel=wheel)
        for each in self.engines:
            text += f"- `{each.path.stem}` was built {where_built(each.manifest)}.\n"
        return (text + ("" if self.cache is None else _SEQUENCES)).rstrip() + "\n"


def _own_files(folder: Path, otherwise: Sequence[str]) -> set[str]:
    """The files of a model that are as this tool wrote them; `otherwise` where it did not list them."""
    if not os.path.lexists(folder / _FILES):
        return {name for name in otherwise if os.path.lexists(folder / name)}
    try:
        data = read_json(folder / _FILES)
        listed = msgspec.convert(data, _Listed).files
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        problem, hint = "The list of the model's files cannot be read.", "another --name"
        raise DeployError(problem, got=f"{folder / _FILES}: {error}", hint=hint) from error

    def is_same(path: Path, digest: str) -> bool:
        with suppress(OSError):
            return not path.is_symlink() and sha256(path) == digest
        return False

    inside = {name: digest for name, digest in listed.items() if ".." not in Path(name).parts}
    return {_FILES, *(name for name, digest in inside.items() if is_same(folder / name, digest))}


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of the files of a model that this tool wrote, with their hashes."""

    tool: dict[str, str]
    files: dict[str, str]


def _type_name(dtype: np.dtype) -> str:
    return f"TYPE_{NAMES[dtype]}"
