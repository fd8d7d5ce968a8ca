"""Kernels from what TensorRT prints: the inspector's JSON, and the layer records of the build log.

The JSON has three dialects. 8.6 and 10.x write a tensor's type and layout into one field,
`Format/Datatype`, and the engine's borders as `Bindings`; 11.x and RTX split it into `Datatype` and
`Format` and call the borders `I/O Tensors`. 8.6 shows a Myelin region as one opaque layer; from 9 on its
kernels are listed. The log prints the same records as lines, and 8.6 has its own kind of line.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.kernels import (
    EngineTensor,
    Kernel,
    dtype_of,
    onnx_nodes_of,
    profile_of,
    without_profile,
)

_REGION = re.compile(r"_myl(\d+)_\d+$")
_RECORD = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<rest>.*)$")
_TACTIC = re.compile(r"TacticName: (.*?), (?:StreamId|Metadata)")
_BODY = re.compile(r"\{ Name: (.*?) \}(?=[,\]])")
_OLD_LINE = re.compile(r"Layer\((?P<type>[^)]*)\): (?P<name>.*), Tactic: (?P<tactic>[^,]*), (?P<io>.*)$")
_OLD_TENSOR = re.compile(
    r"(?P<name>[^,(\[]+?(?: \[profile \d+\])?) ?[\[(](?P<dtype>[A-Z]\w*)[\[(](?P<shape>[^\])]*)[\])]+"
)


def kernels_from_inspector(text: str) -> list[Kernel]:
    """Read the JSON of `EngineInspector.get_engine_information`, of any version.

    Args:
        text: The JSON.

    Returns:
        One kernel per layer. A layer of which only the name is told has no more than its name.

    Raises:
        EngineError: It is not such JSON.
    """
    try:
        # Not strict: names of nodes are joined by a bare control character.
        layers = json.loads(text, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as cause:
        raise EngineError(
            "This is not what TensorRT's engine inspector writes.",
            got=text[:80],
            hint="ask the inspector for LayerInformationFormat.JSON",
        ) from cause
    return _with_profiles([_from_json(layer) for layer in layers])


def kernels_from_log(texts: Iterable[str]) -> list[Kernel]:
    """Read the layer records of a verbose build log; the last ones, should there be several.

    Args:
        texts: The messages of one build.

    Returns:
        One kernel per record; none where the log has no such block.
    """
    kernels: list[Kernel] = []
    old: list[Kernel] = []
    for text in texts:
        if "Layers:\n" in text:
            kernels = _with_profiles(list(_from_block(text)))
        elif "Layer(" in text:
            old += _from_old_lines(text)
    return kernels or _with_profiles(old)


def _from_json(layer: Any) -> Kernel:
    if isinstance(layer, str):
        return Kernel(name=layer, onnx_nodes=_nodes_in_name(layer), source="inspector")
    name = str(layer.get("Name", ""))
    metadata = onnx_nodes_of(str(layer.get("Metadata", "")))
    return Kernel(
        name=name,
        layer_type=str(layer.get("LayerType", "")),
        tactic=str(layer.get("TacticName", "")),
        onnx_nodes=metadata or _nodes_in_name(name),
        inputs=_json_tensors(layer, "Inputs"),
        outputs=_json_tensors(layer, "Outputs"),
        constants=_json_tensors(layer, "Constants"),
        source="inspector",
    )


def _json_tensors(layer: Mapping[str, Any], key: str) -> tuple[EngineTensor, ...]:
    return tuple(
        EngineTensor(
            name=str(tensor.get("Name", "")),
            dtype=dtype_of(str(tensor.get("Datatype") or tensor.get("Format/Datatype", ""))),
            format=str(tensor.get("Format") or tensor.get("Format/Datatype", "")),
            shape=tuple(int(size) for size in tensor.get("Dimensions") or ()),
        )
        for tensor in layer.get(key) or ()
        if isinstance(tensor, Mapping)
    )


def _nodes_in_name(name: str) -> tuple[str, ...]:
    """Node names in a layer's name: `a + b`. A region's name tells only where it begins and ends."""
    if name.startswith("{ForeignNode[") or _REGION.search(name):
        return ()
    return tuple(without_profile(part) for part in name.split(" + "))


def _from_block(text: str) -> Iterator[Kernel]:
    for line in text.split("Layers:\n", 1)[1].split("\n\n")[0].splitlines():
        match = _RECORD.match(line)
        if match is None:
            continue
        records, _, metadata = match["rest"].partition(", Metadata: ")
        inputs, _, rest = records.partition("], Outputs: [")
        inputs, _, constants = inputs.partition("], Constants: [")
        tactic = _TACTIC.search(line)
        yield Kernel(
            name=match["name"],
            layer_type=match["type"],
            tactic=tactic[1] if tactic else "",
            onnx_nodes=onnx_nodes_of(metadata) or _nodes_in_name(match["name"]),
            inputs=_line_tensors(inputs + "]"),
            constants=_line_tensors(constants + "]"),
            outputs=_line_tensors(rest.split(", TacticName: ")[0]),
            source="log",
        )


def _line_tensors(text: str) -> tuple[EngineTensor, ...]:
    return tuple(_line_tensor(body) for body in _BODY.findall(text))


def _line_tensor(body: str) -> EngineTensor:
    split = re.search(r"(?<!/)\bDatatype: (\w+)", body)
    joined = re.search(r"Format/Datatype: (.*)$", body)
    layout = re.search(r", Format: (.*)$", body) or joined
    dims = re.search(r"Dimensions: \[([-\d,\s]*)\]", body)
    told = split or joined
    return EngineTensor(
        name=re.split(r", (?:Location|Dimensions): ", body, maxsplit=1)[0],
        dtype=dtype_of(told[1] if told else ""),
        format=layout[1] if layout else "",
        shape=_shape(dims[1] if dims else ""),
    )


def _from_old_lines(text: str) -> Iterator[Kernel]:
    """Lines of 8.6: `Layer(Myelin): {ForeignNode[a...b]}, Tactic: 0x0, x (Half[1,8]) -> y (Half[1,8])`."""
    for line in text.splitlines():
        match = _OLD_LINE.match(line.strip())
        if match is None:
            continue
        inputs, _, outputs = match["io"].partition(" -> ")
        yield Kernel(
            name=match["name"],
            layer_type=match["type"],
            onnx_nodes=_nodes_in_name(match["name"]),
            inputs=_old_tensors(inputs),
            outputs=_old_tensors(outputs),
            source="log",
        )


def _old_tensors(text: str) -> tuple[EngineTensor, ...]:
    return tuple(
        EngineTensor(name=match["name"].strip(), dtype=dtype_of(match["dtype"]), shape=_shape(match["shape"]))
        for match in _OLD_TENSOR.finditer(text)
    )


def _shape(text: str) -> tuple[int, ...]:
    # `3:4` is three channels in a vector of four.
    return tuple(int(size) for size in re.findall(r"(-?\d+)(?::\d+)?", text))


def _with_profiles(kernels: list[Kernel]) -> list[Kernel]:
    """Give each kernel its profile.

    A kernel of a Myelin region is named for the region, not for the profile, and an engine can have
    several regions per profile. What the region reads carries the profile's mark, so the region decides.
    """
    regions: dict[str, list[str]] = defaultdict(list)
    for kernel in kernels:
        regions[_region(kernel)] += [kernel.name, *(tensor.name for tensor in kernel.tensors)]
    found = {region: profile_of(names) for region, names in regions.items()}
    return [replace(kernel, profile=found[_region(kernel)]) for kernel in kernels]


def _region(kernel: Kernel) -> str:
    match = _REGION.search(kernel.name)
    return match[1] if match else kernel.name
