"""Is every attention of a module right? Each is judged by itself, against the oracle of its own result.

A model may be right as a whole while one of its attentions is off. Where it is wrong, the first wrong
attention shows where to look. What PyTorch computed there in FP64 is in the bundle, by the name of the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from mha_deploy.bundle.cases import GoldenCase, read_arrays, read_case, refuse_implausible, refuse_infinite
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.graph.file import load_graph, with_outputs
from mha_deploy.metrics import OutputVerdict, ParityReport, judge_case, parity_from_verdicts
from mha_deploy.runtime.runner import Runner

LAYERS = "layers"
OpenModel = Callable[[ir.Model], Runner]


def layers_case(bundle: Bundle) -> GoldenCase | None:
    """The golden case that is known inside: its results are those of every attention, by node name.

    None for a bundle without such a case.

    Raises:
        BundleError: The file is not what the manifest says.
    """
    entry = bundle.manifest.layers
    if entry is None:
        return None
    golden = next((each for each in bundle.manifest.golden if each.name == entry.case), None)
    if golden is None:
        raise BundleError("The manifest names no such golden case.", got=entry.case, hint="export again")
    wanted = {f"{group}/{value}" for group in ("oracle", "eager") for value in entry.values.values()}

    def check(names: list[str]) -> None:
        strangers, missing = sorted(set(names) - wanted), sorted(wanted - set(names))
        if strangers:
            raise BundleError(
                "The look inside the module holds strange arrays.",
                got=", ".join(strangers),
                hint="export again",
            )
        if missing:
            raise BundleError(
                "The look inside the module is incomplete.",
                got=f"{entry.file}: no {missing[0]}",
                hint="export again",
            )

    arrays = read_arrays(bundle.file(entry.file), check)
    oracle, eager = (
        {node: arrays[f"{group}/{value}"] for node, value in entry.values.items()}
        for group in ("oracle", "eager")
    )
    refuse_infinite(entry.file, (*oracle.items(), *eager.items()))
    refuse_implausible(entry.file, oracle, eager, bundle.manifest.precision)
    return replace(read_case(bundle, golden), name=LAYERS, oracle=oracle, eager=eager)


def layer_parity(
    bundle: Bundle, open_model: OpenModel, accumulation: tuple[str, str] = ("fp32", "")
) -> ParityReport | None:
    """Judge every attention of a module in a runtime; None where the bundle does not know them."""
    case, entry = layers_case(bundle), bundle.manifest.layers
    if case is None or entry is None:
        return None
    with open_model(with_outputs(load_graph(bundle.model_path), entry.values.values())) as runner:
        got = runner.run(case.inputs)
        return parity_from_verdicts(
            judge_layers(case, got, bundle, accumulate=accumulation[0]),
            model=bundle.manifest.spec.name,
            precision=bundle.manifest.precision,
            backend=runner.name,
            cases=LAYERS,
            accumulation=accumulation,
        )


def judge_layers(
    case: GoldenCase,
    got: dict[str, np.ndarray],
    bundle: Bundle,
    *,
    only: str | None = None,
    accumulate: str = "fp32",
) -> list[OutputVerdict]:
    """The verdicts on the attentions whose values are there, in the order in which they run."""
    entry = bundle.manifest.layers
    values = entry.values if entry else {}
    there = [node for node in case.oracle if values.get(node) in got and only in (None, node)]
    seen = replace(
        case,
        oracle={node: case.oracle[node] for node in there},
        eager={node: case.eager[node] for node in there},
    )
    precision = replace(bundle.manifest.precision, accumulate=accumulate)
    verdicts = judge_case(seen, {node: got[values[node]] for node in there}, precision)
    return sorted(verdicts, key=lambda verdict: there.index(verdict.output))
