"""Tensors that TensorRT does not support: read from its warnings, refused only where they are too large."""

import msgspec
import pytest

from mha_deploy.runtime.tensorrt.kernels import LargeTensor, large_tensors, refuse_large
from mha_deploy.runtime.tensorrt.versions import EngineError

# As TensorRT 8.6.0 reported it of 32 heads over 8, one batch element, up to 8192 tokens.
WARNED = (
    "Profile kMAX values are not self-consistent. attention/scores: tensor volume exceeds (2^31)-1, "
    "dimensions are [1,8,(* 4 S),S] Volume exceeds 2^31-1. Instruction: CHECK_VOLUME 67108863{8192 8192}."
)
AXES = {"B": ("x", 0), "S": ("x", 1), "P": ("past", 2)}
SHAPES = {"x": (3, 4, 64), "past": (3, 8, 5, 64)}


def of(dims):
    note = f"x: tensor volume exceeds (2^31)-1, dimensions are [{dims}] Volume exceeds 2^31-1."
    (found,) = large_tensors([note], AXES)
    return found


@pytest.mark.parametrize(("S", "refused"), [(8192, True), (8191, False), (1, False), (16384, True)])
def test_the_limit_is_where_tensorrt_has_it(S, refused):
    found = large_tensors(["something else: 1 of 2", WARNED, WARNED], AXES)
    assert [each.tensor for each in found] == ["attention/scores"]
    shapes = {"x": (1, S, 4096), "past": (1, 8, 0, 128)}
    if not refused:
        refuse_large(found, shapes)
        return
    with pytest.raises(EngineError, match="does not support a tensor") as caught:
        refuse_large(found, shapes)
    assert caught.value.got.startswith(f"attention/scores with {32 * S * S:,} elements")


@pytest.mark.parametrize(
    ("dims", "elements"),
    [("B,S", 12), ("(+ P S 1),B", 30), ("2,(* B (+ S 1))", 30), ("(* 2 3 4)", 24)],
)
def test_dimensions_are_computed(dims, elements):
    assert of(dims).elements(SHAPES) == elements


@pytest.mark.parametrize("dims", ["(/ S 2),4294967296", "Z,4294967296", "(* 4294967296 2"])
def test_what_cannot_be_read_refuses_nothing(dims):
    assert of(dims).elements(SHAPES) is None
    refuse_large([of(dims)], SHAPES)


def test_other_inputs_than_those_of_the_graph_refuse_nothing():
    large, others = of("4294967296,S"), {"y": (1, 2)}
    assert large.elements(others) is None
    refuse_large([large], others)


def test_another_limit_is_not_ours_to_judge():
    assert large_tensors([WARNED.replace("(2^31)-1", "(2^63)-1")], AXES) == ()


def test_a_manifest_brings_it_back():
    (found,) = large_tensors([WARNED], AXES)
    assert msgspec.json.decode(msgspec.json.encode(found), type=LargeTensor) == found


def test_the_remedy_is_reported():
    (found,) = large_tensors([WARNED], AXES)
    assert all(part in found.advice for part in ("attention/scores", "--profile", "--attention plugin"))
