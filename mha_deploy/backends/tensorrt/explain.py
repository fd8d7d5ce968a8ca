"""What a failed build means: the builder's errors in words a user can act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.backends.tensorrt.errors import EngineError, NotFusedError
from mha_deploy.backends.tensorrt.log import Message, errors
from mha_deploy.backends.tensorrt.onnx_names import NodeNames
from mha_deploy.backends.tensorrt.versions import TensorRT


@dataclass(frozen=True, kw_only=True)
class _Known:
    sign: re.Pattern[str]
    what: str
    hint: str
    is_attention: bool = False


_KNOWN = (
    _Known(
        sign=re.compile(r"is_decomposable\(\)|not supported by a dedicated kernel|no fused kernel"),
        what="Attention has no fused kernel for this target, and may not be decomposed",
        hint="use fp16 or bf16 and a head size of 16 to 256; or --allow-decomposed, and lose speed",
        is_attention=True,
    ),
    _Known(
        sign=re.compile(r"graph_jit\.cpp.*CUDA_SUCCESS"),
        what="The builder has to run a kernel to prepare weights that stay replaceable, and finds no GPU",
        hint="build without refit and strip_weights, or on a machine with a GPU",
    ),
    _Known(
        sign=re.compile(r"HW-specific datatypes"),
        what="A target has no hardware for a type in the graph",
        hint="leave that target out, or export in fp16",
    ),
    _Known(
        sign=re.compile(r"element type \(\w+\) differs"),
        what="Two tensors of different types meet in one operator",
        hint="give the mask in the type of the queries",
    ),
    _Known(
        sign=re.compile(r"Build canceled"),
        what="The build was cancelled",
        hint="start it again",
    ),
    _Known(
        sign=re.compile(r"[Oo]ut of memory|OutOfMemory"),
        what="The GPU has not enough memory for this build",
        hint="set a smaller workspace, or smaller max shapes",
    ),
)


def build_failure(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> EngineError:
    """Make the error of a build that returned nothing.

    Args:
        rt: The TensorRT that was building.
        messages: What it said.
        names: The nodes of the graph.
    """
    found = names.link(errors(messages))
    text = "; ".join(dict.fromkeys(_line(message) for message in found)) or "the builder gave no reason"
    known = next((entry for entry in _KNOWN if entry.sign.search(text)), None)
    nodes = tuple(dict.fromkeys(node for message in found for node in message.nodes))
    if known and known.is_attention and not nodes:
        # The builder does not say which: it is one of these.
        nodes = names.attention
    what = f"{known.what} ({rt.title})." if known else f"{rt.title} could not build the engine."
    if known and known.is_attention:
        # What the builder says of it is long and tells no more.
        among = "one of " if len(nodes) > 1 else "node "
        return NotFusedError(what, got=f"{among}{', '.join(nodes)}", hint=known.hint, nodes=nodes)
    return EngineError(what, got=text, hint=known.hint if known else None, nodes=nodes)


def _line(message: Message) -> str:
    text = " ".join(message.text.split())
    return f"node {', '.join(message.nodes)}: {text}" if message.nodes else text
