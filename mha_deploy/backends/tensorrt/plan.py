"""Kernels from the bytes of a plan: what an engine is, without a GPU and without its log.

A plan of TensorRT-RTX holds one Myelin program per profile, in readable text: its targets, its tensors with
their types, and its steps with the ONNX nodes they compute; a plan of 8.6 holds one per Myelin region. The
format is not documented, so nothing is taken for granted: a plan without such a program gives no kernels,
and the verdict is then unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mha_deploy.backends.tensorrt.kernels import EngineTensor, Kernel, dtype_of, onnx_nodes_of, profile_of

_HEADER = b"header {\n"
_MAIN = b"\nmain {\n"
_END = b"\n}"

_TENSOR = re.compile(
    r'tensor=\{.*? dims=\{(?P<dims>[^}]*)\}.*? name="(?P<name>[^"]*)".*? type=(?P<dtype>\w+)'
)
_CONSTANT = " const_payload_size="
_STEP = re.compile(r"^\s*(?P<kind>\w+)=\{ name=(?:\"(?P<quoted>[^\"]*)\"|(?P<bare>\S+))")
_LAYERS = re.compile(r'layers="([^"]*)"')
_KERNEL = re.compile(r"\b(?:fqn|kernel)=(\S+)")
# Names hold braces, so a list ends at the first brace outside quotes.
_INPUTS = re.compile(r'\binput(?:_args)?=\{((?:\s*"[^"]*")*)\s*\}')
_OUTPUTS = re.compile(r'\boutput(?:_args)?=\{((?:\s*"[^"]*")*)\s*\}')

# The plan's word for a step, in the words of the layer records.
_KINDS = {"function": "kgen", "fully_connected": "gemm"}


def kernels_from_plan(plan: bytes) -> list[Kernel]:
    """Read the steps of every program in a plan.

    Args:
        plan: The serialised engine.

    Returns:
        One kernel per step; none if the plan has no readable program.
    """
    return [kernel for program in _programs(plan) for kernel in _kernels(program)]


def plan_targets(plan: bytes) -> tuple[str, ...]:
    """The compute capabilities a plan was compiled for, as it says itself: `sm89`, `sm120`."""
    found = (re.search(r"accelerators=\{([^}]*)\}", program) for program in _programs(plan))
    return tuple(dict.fromkeys(name for match in found if match for name in match[1].split()))


def _programs(plan: bytes) -> Iterator[str]:
    """The text of each program, from its header to the end of its main block."""
    start = plan.find(_HEADER)
    while start >= 0:
        following = plan.find(_HEADER, start + 1)
        limit = following if following >= 0 else len(plan)
        main = plan.find(_MAIN, start, limit)
        end = plan.find(_END, main + len(_MAIN), limit) if main >= 0 else -1
        if end >= 0:
            yield plan[start:end].decode("utf-8", errors="replace")
        start = following


def _kernels(program: str) -> Iterator[Kernel]:
    head, _, main = program.partition(_MAIN.decode())
    declared = _declared(head)
    profile = profile_of([program])
    for line in main.split("\n"):
        match = _STEP.match(line)
        if match is not None:
            yield _kernel(line, match, declared, profile)


def _declared(head: str) -> dict[str, tuple[EngineTensor, bool]]:
    """The tensors of a program by name, and whether each is a constant."""
    return {
        match["name"]: (
            EngineTensor(name=match["name"], dtype=dtype_of(match["dtype"]), shape=_shape(match["dims"])),
            _CONSTANT in match[0],
        )
        for match in _TENSOR.finditer(head)
    }


def _shape(dims: str) -> tuple[int, ...]:
    # A dynamic size is the quoted name of the variable that holds it.
    return tuple(int(size) if size.isdigit() else -1 for size in dims.split())


def _kernel(
    line: str, step: re.Match[str], declared: dict[str, tuple[EngineTensor, bool]], profile: int
) -> Kernel:
    layers = _LAYERS.search(line)
    tactic = _KERNEL.search(line)
    # A name that is not declared is a size that is computed on the way, not data.
    read = [declared[name] for name in _names(_INPUTS, line) if name in declared]
    written = [declared[name] for name in _names(_OUTPUTS, line) if name in declared]
    return Kernel(
        name=step["quoted"] or step["bare"] or "",
        layer_type=_KINDS.get(step["kind"], step["kind"]),
        tactic=tactic[1] if tactic else "",
        onnx_nodes=onnx_nodes_of(layers[1] if layers else ""),
        inputs=tuple(tensor for tensor, constant in read if not constant),
        constants=tuple(tensor for tensor, constant in read if constant),
        outputs=tuple(tensor for tensor, _ in written),
        profile=profile,
        source="plan",
    )


def _names(pattern: re.Pattern[str], line: str) -> list[str]:
    match = pattern.search(line)
    return re.findall(r'"([^"]*)"', match[1]) if match else []
