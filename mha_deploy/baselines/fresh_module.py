"""What is true of a user's module beyond its golden cases: its factory makes it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mha_deploy.analyze.sizes import sizes_name
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.export.exported import ExportedModule
from mha_deploy.export.inputs import tensor_from_numpy, to_numpy
from mha_deploy.export.module_exporter import exported_program
from mha_deploy.export.module_golden import ModuleCapture
from mha_deploy.export.user_module import reopen_user_module
from mha_deploy.export.widened import run_program
from mha_deploy.golden import GoldenCase
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import Precision, find_precision


class FreshModuleCases:
    """Makes cases for the module of a bundle, on the CPU.

    Args:
        spec: The module.
        precision: Its precision.
        known: Reads a golden case of the bundle, in which the module must still be what it was.

    Raises:
        DeployError: The factory is not here, or gives another module than that in the bundle.
    """

    def __init__(self, spec: ModuleSpec, precision: Precision, *, known: Callable[[], GoldenCase]) -> None:
        if spec.mixed:
            raise DeployError(
                "What is true of fresh inputs is not known for a mixed precision.",
                got="--precision auto",
                hint="the golden cases, or --golden at export for other sizes",
            )
        self._spec = spec
        self._user = reopen_user_module(spec, precision)
        self._exported = exported_program(self._user)
        _true_inside(self._exported, known(), ())

    def case(
        self, sizes: Mapping[str, int], *, seed: int, ragged: bool = False, past: int | None = None
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them; see `FreshCases.case`.

        Which rows are short, or how full a cache is, a module is told by inputs of its own.
        """
        del ragged, past
        self._spec.check_sizes(sizes)
        name = f"fresh-{sizes_name(sizes)}-seed{seed}"
        return ModuleCapture(self._user, self._exported, seed).capture(name, sizes)


class ProgramValues:
    """What is true of values inside the module of a bundle.

    Args:
        spec: The module.
        precision: Its precision.

    Raises:
        DeployError: The factory is not here, or gives other weights than those in the bundle.
    """

    def __init__(self, spec: ModuleSpec, precision: Precision) -> None:
        # A mixed graph was made from the module in float32, and its values have the names of that program.
        own = find_precision("fp32") if spec.mixed else precision
        self._exported = exported_program(reopen_user_module(spec, own))

    def at(self, case: GoldenCase, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Values of the graph in FP64, by their names; what the program does not compute is left out."""
        known = [name for name in names if self._exported.node_of(name) is not None]
        return _true_inside(self._exported, case, known)


def _true_inside(exported: ExportedModule, case: GoldenCase, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Values of the program in FP64, which must give what it gave when the case was captured."""
    inputs = {name: tensor_from_numpy(array) for name, array in case.inputs.items()}
    outputs, kept = run_program(exported, inputs, keep=names)
    _refuse_another_module(case, {name: to_numpy(tensor) for name, tensor in outputs.items()})
    return {name: to_numpy(tensor) for name, tensor in kept.items()}


def _refuse_another_module(case: GoldenCase, outputs: Mapping[str, np.ndarray]) -> None:
    """The weights may be the same, and what the factory's file does with them not."""
    for name, oracle in case.oracle.items():
        found = outputs.get(name)
        if (
            found is None
            or found.shape != oracle.shape
            or not np.allclose(found, oracle, rtol=1e-6, atol=1e-9)
        ):
            raise BundleError(
                "The factory's module computes something else now than when it was exported.",
                got=f"output {name} of golden case {case.name}",
                hint="export again",
            )
