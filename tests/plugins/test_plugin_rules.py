"""What the plugin's C++ refuses, Python refuses by the same rules: compared over random nodes."""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mha_deploy.engine.plugins import source_folder
from mha_deploy.graph.plugin_node import NodeSizes, why_refused

NODES = 6000


def cuda_headers():
    """The folders with cuda.h; the other headers of CUDA are not needed."""
    roots = [Path(path) for path in (os.environ.get("CUDA_HOME"), sysconfig.get_path("purelib")) if path]
    roots += [Path(path) for path in sys.path]
    for root, pattern in [(Path("/usr/local"), "cuda*/include"), *((each, "include") for each in roots)]:
        yield from (each.parent for each in root.glob(f"{pattern}/cuda.h"))
    for root in roots:
        yield from (each.parent for each in root.glob("nvidia/*/include/cuda.h"))


@pytest.fixture(scope="module")
def accepts(tmp_path_factory):
    """The C++ rules, compiled: from lines of nodes to whether each is accepted."""
    compiler, headers = shutil.which("c++"), next(cuda_headers(), None)
    if compiler is None or headers is None:
        pytest.skip("a compiler and cuda.h are not here")
    source, program = source_folder(), tmp_path_factory.mktemp("rules") / "rules"
    command = [compiler, "-std=c++17", f"-I{source / 'src'}", f"-isystem{headers}"]
    # The kernels are not linked: nothing here launches one.
    command += ["-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Wl,-z,lazy"]
    command += ["-Wl,--unresolved-symbols=ignore-all", "-o", str(program)]
    files = ("tests/rules.cpp", "src/attention.cpp", "src/sparse_heads.cpp")
    subprocess.run([*command, *(str(source / each) for each in files)], check=True)

    def run(lines):
        text = "\n".join(lines) + "\n"
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
        return [each == "1" for each in done.stdout.split()]

    return run


def drawn(rng):
    """A node that is nearly right, and its sizes."""
    pick = rng.choice
    keys = pick([1, 2, 3])
    size = pick([8, 16, 64, 128, 256, 12, 264])
    own = {
        "query_heads": keys * pick([1, 1, 2, 4]) + pick([0] * 12 + [1]),
        "key_heads": keys,
        "head_size": size,
        "value_size": pick([size, size, size, 32, 24]),
        "scale": pick([0.125, 1.0, 1.0, 0.0, -1.0]),
        "causal": pick([0, 0, 1, 2, 2, 3]) if rng.random() < 0.3 else pick([0, 1, 2]),
        "left_window": pick([-1, -1, -1, 0, 3, -2]) if rng.random() < 0.4 else -1,
        "right_window": pick([-1, -1, -1, 0, 2]) if rng.random() < 0.4 else -1,
        "sources": pick([[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 1, 1], [1, 0, 0], [0, 2, 2], [0, 1, 3]]),
        "offsets": [0, 0, 0],
        "has_bias": pick([0, 1]),
        "has_key_lengths": pick([0, 0, 1]),
        "has_key_mask": pick([0] * 5 + [1]),
        "has_gates": pick([0] * 5 + [1]),
        "has_cache": pick([0, 0, 1]),
        "rotary": pick([0, 0, 1, 2]),
        "rotary_size": pick([size, size, 8, 16, 24, 0]),
        "rotary_positions": pick([0, 1, 2, 3]),
        "fp8": pick([0, 0, 0, 1]),
        "fp8_copy": pick([0, 0, 0, 1]),
        **dict.fromkeys(("query_scale", "key_scale", "value_scale", "weights_scale"), 0.01),
        "output_scale": pick([0.01] * 8 + [0.0, -1.0]),
    }
    B, S = pick([1, 2, 3]), pick([0, 1, 2, 5])
    new = S if own["has_cache"] or rng.random() < 0.6 else pick([1, 3, 7])
    T = max(S, pick([1, 5, 9])) - pick([0] * 9 + [1]) if own["has_cache"] else new
    widths = [own["query_heads"] * size, keys * size, keys * own["value_size"]]
    operands = []
    for at in range(1 + max(own["sources"])):
        held = [part for part in range(3) if own["sources"][part] == at]
        width = sum(widths[part] for part in held)
        start = 0
        for part in held:
            own["offsets"][part] = start + pick([0] * 15 + [4, 8])
            start += widths[part]
        rows = S if 0 in held else new
        if len(held) == 1 and rng.random() < 0.4:
            heads = own["query_heads"] if held == [0] else keys
            operands.append((B, heads, rows, own["value_size"] if held == [2] else size))
        else:
            operands.append((B + pick([0] * 15 + [1]), rows, width + pick([0] * 9 + [8, 4])))
    bias = ()
    if own["has_bias"] and rng.random() < 0.95:
        bias = (pick([1, B]), pick([1, own["query_heads"]]), S, pick([T] * 9 + [1]))
    return own, NodeSizes(tuple(operands), bias, T if own["has_cache"] else 0, pick([S, S, 0, 4]))


def line_of(own, sizes):
    numbers = []
    for value in own.values():
        numbers += value if isinstance(value, list) else [value]
    numbers.append(len(sizes.operands))
    for dims in (*sizes.operands, sizes.bias):
        numbers += [len(dims), *dims]
    return " ".join(map(str, [*numbers, sizes.cache_rows, sizes.table_rows]))


def test_the_rules_in_python_are_those_of_the_plugin(accepts):
    rng = random.Random(0)
    nodes = [drawn(rng) for _ in range(NODES)]
    found = accepts(line_of(*node) for node in nodes)
    for (own, sizes), accepted in zip(nodes, found, strict=True):
        assert (why_refused(own, sizes) is None) == accepted, (own, sizes, why_refused(own, sizes))
    assert NODES // 20 < sum(found) < NODES // 2  # both are compared
