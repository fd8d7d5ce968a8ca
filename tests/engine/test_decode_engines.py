"""Published models that generate: prompts and single tokens are two profiles of one engine, fused in both.

Built for a GPU that need not be there, with random weights and without golden cases: whether the numbers are
right is reported by the graph on a CPU, and by an engine on a GPU.
"""

from dataclasses import dataclass

import onnx_ir as ir
import pytest
import torch

from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.engine.engine import default_profiles, profile_names, profile_shapes
from mha_deploy.engine.lowered import check_eligibility, native_dialect, targets_of
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.graph.file import save_graph
from mha_deploy.graph.lower import lower
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import Axis
from mha_deploy.options import EngineOptions
from mha_deploy.reference import build_module
from mha_deploy.runtime.tensorrt.builder import BuildRequest, BuiltEngine, build_engine
from mha_deploy.runtime.tensorrt.engine_verdict import EngineVerdict
from mha_deploy.runtime.tensorrt.versions import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

pytestmark = pytest.mark.slow  # tests/engine/test_profiles.py builds small ones
MODELS = ["llama-3-8b", "falcon-7b", "llama-2-70b"]
# Shorter than the model's own: the builder takes the same kernels, and less time.
AXES = {"B": Axis(min=1, opt=1, max=2), "S": Axis(min=1, opt=128, max=256)}
CACHE_AXES = {
    "dynamic": {"P": Axis(min=0, opt=256, max=511)},
    "preallocated": {"T": Axis(min=512, opt=512, max=512)},
}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A layer with its cache, the graph as TensorRT got it, and what it made of it."""

    spec: AttentionSpec
    lowered: ir.Model
    built: BuiltEngine
    verdict: EngineVerdict
    profile_names: list[str]


@pytest.fixture(scope="module", params=["dynamic", "preallocated"])
def cache(request):
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def decoder(request, cache, tmp_path_factory):
    """One engine of every model and cache."""
    spec = find_spec(request.param).with_axes(AXES).with_cache(cache).with_axes(CACHE_AXES[cache])
    model = canonical_from_module(build_module(spec, dtype=torch.float16))
    rt = load("tensorrt-rtx")
    (target,) = targets_of(rt, EngineOptions(backend="tensorrt-rtx", targets="8.9"))
    (answer,) = check_eligibility(model, target)
    lowered = lower(model, native_dialect(rt), **answer.options)
    path = tmp_path_factory.mktemp(f"{spec.name}-{cache}") / "model.onnx"
    save_graph(lowered, path)
    profiles = default_profiles(spec)
    wanted = BuildRequest(
        onnx=path,
        precision="fp16",
        profiles=[profile_shapes(spec, each) for each in profiles],
        options=EngineOptions(targets="8.9"),
    )
    built = build_engine(rt, wanted)
    verdict = judge_engine(with_plugin_roles(built, lowered), lowered, model, "fp16", len(profiles))
    for file in path.parent.iterdir():  # hundreds of megabytes
        file.unlink()
    return Decoder(
        spec=spec,
        lowered=lowered,
        built=built,
        verdict=verdict,
        profile_names=profile_names(spec, profiles),
    )


def fused_kernel(built, profile):
    """The one attention kernel of a profile, as the plan has it."""
    (kernel,) = [k for k in built.kernels["plan"] if k.profile == profile and "_mha_v" in k.name]
    return kernel


def shapes_of(tensors):
    return [tensor.shape for tensor in tensors]


def test_prompts_and_tokens_are_two_profiles_fused_in_both(decoder):
    verdict, names = decoder.verdict, decoder.profile_names
    assert names == ["prefill", "decode"]
    assert [(node.profile, node.status) for node in verdict.nodes] == [(0, "fused"), (1, "fused")]
    prefill, decode = (node.kernels[0] for node in verdict.nodes)
    assert prefill.startswith("_gemm_mha_v2")
    assert decode.startswith("_gemv_mha_v1")
    assert verdict.disagreements == ()
    assert verdict.precision.status in ("verified", "selected at load")  # by the version of RTX


def test_a_token_reads_the_shared_heads_as_they_are(decoder):
    spec, kernel = decoder.spec, fused_kernel(decoder.built, 1)
    T = 512 if spec.cache == "preallocated" else -1
    keys_and_values = [shape for shape in shapes_of(kernel.inputs) if shape[-2:] == (T, spec.D)]
    assert keys_and_values == [(-1, spec.Hkv, T, spec.D)] * 2
    assert not {"Expand", "Tile"} & set(before_attention(decoder.lowered))


def test_a_prompt_has_its_keys_and_values_repeated_by_the_builder(decoder):
    """Seen with TensorRT-RTX 1.7: the kernel for prompts takes shared heads only where T is S.

    What it is given is one row of keys for every query head, [B·Hq, D, T], made by a kernel of its own.
    Should a version stop doing that, this test says so.
    """
    spec, kernel = decoder.spec, fused_kernel(decoder.built, 0)
    T = 512 if spec.cache == "preallocated" else -1
    assert (-1, spec.D, T) in shapes_of(kernel.inputs)
    assert not [shape for shape in shapes_of(kernel.inputs) if shape == (-1, spec.Hkv, T, spec.D)]


def before_attention(lowered):
    """The operators that keys and values pass behind the projections."""
    attention = next(node for node in lowered.graph if node.op_type == "Attention")
    pending, found = [attention.inputs[1], attention.inputs[2]], []
    while pending:
        value = pending.pop()
        node = value.producer() if value is not None else None
        if node is not None and node.op_type not in ("RotaryEmbedding", "MatMul"):
            found.append(node.op_type)
            pending.extend(node.inputs)
    return found


def test_the_cache_is_as_long_as_requested_in_both_profiles(decoder):
    spec = decoder.spec
    prefill, decode = (profile_shapes(spec, each) for each in default_profiles(spec))
    assert prefill["x"][2] == (2, 256, spec.E)
    assert decode["x"] == ((1, 1, spec.E), (1, 1, spec.E), (2, 1, spec.E))
    name, rows = ("past_key", (0, 0, 511)) if spec.cache == "dynamic" else ("key_cache", (512, 512, 512))
    assert tuple(shape[2] for shape in prefill[name]) == rows
    assert decode[name][2][2] == rows[2]
