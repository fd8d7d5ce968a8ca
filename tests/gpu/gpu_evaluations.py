"""Evaluations on a GPU, and what is right of them."""

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.model.catalog import catalog_names
from mha_deploy.options import ValidateOptions
from mha_deploy.validation.decode import traces_of
from mha_deploy.validation.evaluate import EvaluationPlan, evaluate

TINY = [name for name in catalog_names() if name.startswith("tiny-")]

# torch.compile, PyTorch's own choice of a kernel and its slowest are judged in tests/baselines.
# What decodes a layer with a cache token by token, its cache where the runtime keeps it.
DECODES = ("eager", "ort-cuda", "ort-cuda-contrib", "tensorrt", "plugin")


def evaluated(finder, runtime, *, invariance=False):
    """Run every golden case through one runtime."""
    manifest = finder.bundle.manifest
    plan = EvaluationPlan(
        spec=manifest.spec,
        precision=manifest.precision,
        cases={"golden": list(golden_cases(finder.bundle))},
        invariance=invariance,
        traces=traces_of(finder.bundle, ValidateOptions()) if runtime in DECODES else (),
    )
    return evaluate(finder.named(runtime), plan)


def assert_right(evaluation):
    (report,) = evaluation.parity
    assert any(verdict.passed for verdict in report.verdicts)
    assert not [verdict for verdict in report.verdicts if verdict.is_wrong]
    # The attention weights of a single token are 1, whatever computes them: such a case shows nothing.
    assert {verdict.output for verdict in report.verdicts if not verdict.passed} <= {"weights"}
    # A check without a case had nothing to vary, as the profiles of an engine that has one.
    assert not [check for check in evaluation.invariance if check.case and not check.passed]
    for decoded in evaluation.decode_reports:
        assert decoded.passed, decoded.failures[:3]
