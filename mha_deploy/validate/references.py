"""What values inside a model must be, told by somebody who can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mha_deploy.backends import available_cpu_backend, open_runner
from mha_deploy.bundle import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.golden import GoldenCase
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.outputs import with_outputs
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.validate.bisect import Reference
from mha_deploy.versions import can_import

_OTHER = {"ort-cpu": "onnx-reference", "onnx-reference": "ort-cpu"}


def reference_for(bundle: Bundle, case: GoldenCase, backend: str) -> tuple[Reference, str]:
    """Whoever knows best what is true inside a model, and what to call it.

    Of a user's module it is its program in FP64, where PyTorch and the factory are here. Otherwise it is the
    bundle's own graph on a CPU, in another runtime than the one that is doubted.

    Args:
        bundle: The bundle.
        case: The golden case whose values are asked for.
        backend: The runtime that is doubted.
    """
    spec = bundle.manifest.spec
    if isinstance(spec, ModuleSpec) and can_import("torch"):
        try:
            return _program(bundle, spec, case), "the module's program in FP64"
        except DeployError:  # its factory is not here: the graph must do
            pass
    trusted = available_cpu_backend(bundle.manifest.precision)
    trusted = _OTHER.get(trusted, trusted) if trusted == backend else trusted
    return _graph(bundle, case, trusted), f"the graph in {trusted}"


def _program(bundle: Bundle, spec: ModuleSpec, case: GoldenCase) -> Reference:
    from mha_deploy.baselines.fresh_module import ProgramValues

    program = ProgramValues(spec, bundle.manifest.precision)
    return lambda names: program.at(case, names)


def _graph(bundle: Bundle, case: GoldenCase, backend: str) -> Reference:
    def values(names: Sequence[str]) -> Mapping[str, np.ndarray]:
        model = load_graph(bundle.model_path)
        with open_runner(backend, with_outputs(model, names)) as runner:
            got = runner.run(case.inputs)
        return {name: got[name] for name in names}

    return values
