"""Closed-form counts, GPU figures, the roofline, and how they are shown."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from mha_deploy.analysis.roofline import (
    GpuPeaks,
    analyze_layer,
    find_peaks,
    gpu_names,
    known_gpus,
    parse_peaks,
)
from mha_deploy.cli.tables import analysis_renderable
from mha_deploy.errors import DeployError, SpecError
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import (
    AttentionSpec,
    GroupedMlp,
    SparseHeads,
    kv_cache_bytes_per_token,
    layer_cost,
    parameter_count,
)
from mha_deploy.model.spec import Axis

WIDE = Axis(min=1, opt=4, max=100_000)


def make_spec(**changes):
    base = {"name": "test", "Hq": 2, "Hkv": 2, "D": 2, "E": 4, "axes": {"B": WIDE, "S": WIDE}}
    return AttentionSpec(**{**base, **changes})


def cross_spec(**changes):
    return make_spec(attends="cross", axes={"B": WIDE, "S": WIDE, "T": WIDE}, **changes)


def stage(spec, name, bytes_per_element=2, **sizes):
    stages = layer_cost(spec, sizes, bytes_per_element).stages
    return next(item for item in stages if item.name == name)


VARIANTS = {
    "sparse-heads": make_spec(variant="sparse-heads", sparse_heads=SparseHeads(top_k=1)),
    "grouped-mlp": make_spec(variant="grouped-mlp", grouped_mlp=GroupedMlp(groups=2, hidden=5)),
    "head-mix": make_spec(variant="head-mix"),
}


class TestParameters:
    @pytest.mark.parametrize("Hq", [1, 2, 8, 64])
    def test_multi_head_is_four_square_matrices_whatever_the_heads(self, Hq):
        spec = make_spec(E=64, Hq=Hq, Hkv=Hq, D=64 // Hq)
        assert parameter_count(spec) == 4 * 64**2 + 4 * 64
        assert parameter_count(replace(spec, bias=False)) == 4 * 64**2

    @pytest.mark.parametrize("Hkv", [1, 2, 4, 8])
    def test_grouped_query_shrinks_only_keys_and_values(self, Hkv):
        E, D = 128, 16
        spec = make_spec(E=E, Hq=8, Hkv=Hkv, D=D, bias=False)
        assert parameter_count(spec) == E**2 + 2 * E * Hkv * D + E**2

    def test_packing_changes_nothing(self):
        spec = make_spec(Hkv=1)
        assert parameter_count(replace(spec, projections="packed")) == parameter_count(spec)

    def test_variants_by_hand(self):
        plain = parameter_count(make_spec())
        assert plain == 4 * (16 + 4)
        assert parameter_count(VARIANTS["sparse-heads"]) == plain + 4 * 2
        within = 2 * (2 * 2 + 2)
        assert parameter_count(VARIANTS["grouped-mlp"]) == 3 * (16 + 4) + within + (4 * 5 + 5) + (5 * 4 + 4)
        assert parameter_count(VARIANTS["head-mix"]) == plain + 3 * (2 * 2 + 2)

    @pytest.mark.parametrize(
        "spec", [find_spec(name) for name in catalog_names()], ids=lambda spec: spec.name
    )
    def test_catalogue_agrees_with_the_module(self, spec):
        assert parameter_count(spec) == module_parameters(spec)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_variants_agree_with_the_module(self, variant, bias):
        spec = replace(VARIANTS[variant], bias=bias)
        assert parameter_count(spec) == module_parameters(spec)


def module_parameters(spec):
    pytest.importorskip("torch")
    from mha_deploy.reference import build_module

    return sum(parameter.numel() for parameter in build_module(spec, device="meta").parameters())


class TestCost:
    """E=4, two heads of 2, B=1, S=3, two bytes per element unless said otherwise."""

    def test_plain_layer_by_hand(self):
        projections, attention, output = layer_cost(make_spec(), {"B": 1, "S": 3}, 2).stages
        # three matrices of 4x4 on 3 tokens; reads x (12), writes q, k, v (36)
        assert (projections.parameters, projections.flops) == (60, 3 * 2 * 3 * 16)
        assert projections.bytes == 2 * (60 + 12 + 36)
        # 9 pairs x 2 heads x 2 matmuls of length 2; reads q, k, v (36), writes the heads (12)
        assert (attention.parameters, attention.flops) == (0, 9 * 2 * 2 * 2 * 2)
        assert attention.bytes == 2 * (36 + 12)
        assert (output.parameters, output.flops, output.bytes) == (20, 96, 2 * (20 + 12 + 12))
        assert output.intensity == 96 / 88

    def test_totals_add_up(self):
        cost = layer_cost(make_spec(), {"B": 1, "S": 3}, 2)
        assert (cost.parameters, cost.flops, cost.bytes) == (80, 288 + 144 + 96, 216 + 96 + 88)
        assert cost.intensity == 528 / 400

    def test_grouped_query_moves_fewer_keys_and_values(self):
        item = stage(make_spec(Hkv=1), "attention", B=1, S=3)
        assert item.flops == stage(make_spec(), "attention", B=1, S=3).flops
        assert item.bytes == 2 * (12 + 2 * 6 + 12)

    @pytest.mark.parametrize("S", [1, 2, 3, 1000])
    def test_causal_counts_the_lower_triangle(self, S):
        full = stage(make_spec(), "attention", B=2, S=S)
        causal = stage(make_spec(causal=True), "attention", B=2, S=S)
        assert causal.flops * 2 * S == full.flops * (S + 1)
        assert causal.bytes == full.bytes

    def test_attention_grows_with_the_square_and_projections_do_not(self):
        spec = make_spec()
        for name, factor in (("projections", 10), ("attention", 100), ("output", 10)):
            assert stage(spec, name, B=1, S=50).flops == factor * stage(spec, name, B=1, S=5).flops

    def test_cross_attention_reads_three_inputs(self):
        spec = cross_spec()
        projections = stage(spec, "projections", B=1, S=3, T=5)
        assert projections.flops == 2 * 16 * (3 + 5 + 5)
        assert projections.bytes == 2 * (60 + 4 * (3 + 5 + 5) * 2)
        attention = stage(spec, "attention", B=1, S=3, T=5)
        assert (attention.flops, attention.bytes) == (4 * 2 * 2 * 15, 2 * 2 * (12 + 20))

    def test_masks_and_weights_are_traffic(self):
        sizes = {"B": 3, "S": 5}
        plain = stage(make_spec(), "attention", **sizes).bytes
        assert stage(make_spec(mask="padding"), "attention", **sizes).bytes == plain + 4 * 3
        assert stage(make_spec(mask="additive"), "attention", **sizes).bytes == plain + 2 * 2 * 25
        assert stage(make_spec(weights=True), "attention", **sizes).bytes == plain + 2 * 3 * 2 * 25

    def test_output_stages_of_the_variants_by_hand(self):
        def output(variant):
            stages = layer_cost(VARIANTS[variant], {"B": 1, "S": 3}, 2).stages[2:]
            return [(item.flops, item.bytes) for item in stages]

        assert output("sparse-heads") == [(2 * 3 * 8, 2 * (8 + 12 + 6)), (96, 2 * (20 + 12 + 6 + 12))]
        mlp = [(2 * 3 * 20, 2 * (25 + 12 + 15)), (2 * 3 * 20, 2 * (24 + 15 + 12))]
        assert output("grouped-mlp") == [(2 * 3 * 8, 2 * (12 + 12 + 12)), *mlp]
        # per token 2 heads through three 2x2 matrices, then 4 pairs of heads x 2 matmuls of length 2
        mix = [(3 * 3 * 2 * 2 * 4, 2 * (18 + 4 * 12)), (3 * 4 * 2 * 2 * 2, 2 * 4 * 12)]
        assert output("head-mix") == [*mix, (96, 88)]

    @pytest.mark.parametrize("spec", [make_spec(Hkv=1), cross_spec(), *VARIANTS.values()])
    def test_flops_are_what_the_module_multiplies(self, spec):
        torch, counter = pytest.importorskip("torch"), pytest.importorskip("torch.utils.flop_counter")
        from mha_deploy.reference import build_module

        sizes = {axis: size for axis, size in {"B": 2, "S": 3, "T": 5}.items() if axis in spec.axes}
        inputs = [torch.empty(tensor.shape(sizes), device="meta") for tensor in spec.inputs]
        with counter.FlopCounterMode(display=False) as counted:
            build_module(spec, device="meta", path="plain")(*inputs)
        assert layer_cost(spec, sizes, 2).flops == counted.get_total_flops()

    def test_sizes_outside_the_axes_are_refused(self):
        with pytest.raises(SpecError, match="S=9000"):
            layer_cost(find_spec("llama-3-8b"), {"B": 1, "S": 9000}, 2)


class TestKvCache:
    def test_llama_3_8b(self):
        spec = find_spec("llama-3-8b")
        assert kv_cache_bytes_per_token(spec, 2) == 4096
        assert analyze_layer(spec, {"B": 2, "S": 8192}, "fp16", "h200").kv_bytes == 2 * 8192 * 4096

    def test_falcon_7b_is_multi_query(self):
        falcon = find_spec("falcon-7b")
        assert kv_cache_bytes_per_token(falcon, 2) == 256
        assert kv_cache_bytes_per_token(falcon, 4) == 512


class TestGpus:
    @pytest.mark.parametrize(
        "name", ["rtx-4090", "RTX 4090", "Rtx4090", " rtx_4090 ", "NVIDIA GeForce RTX 4090"]
    )
    def test_spelling_does_not_matter(self, name):
        assert find_peaks(name).name == "RTX 4090"

    @pytest.mark.parametrize("name", gpu_names())
    def test_every_name_finds_its_own_figures(self, name):
        gpu = find_peaks(name)
        assert gpu.name.lower().replace(" ", "-") == name
        assert gpu.fp16_tflops > gpu.fp32_tflops > 1
        assert gpu.source

    def test_names_and_aliases_are_unique(self):
        spellings = [alias for gpu in known_gpus() for alias in (gpu.name, *gpu.aliases)]
        assert all(find_peaks(alias) in known_gpus() for alias in spellings)
        assert len({alias.lower() for alias in spellings}) == len(spellings)

    def test_geforce_figures_are_for_fp32_accumulation(self):
        assert find_peaks("rtx 4090").peak_flops("fp16") == pytest.approx(165.2e12)

    @pytest.mark.parametrize(
        ("name", "hint"), [("RTX 4909", "'rtx-4090'"), ("h20", "'h200'"), ("tpu", "one of: a10, a100")]
    )
    def test_unknown_names_get_a_suggestion(self, name, hint):
        with pytest.raises(DeployError, match=hint):
            find_peaks(name)

    def test_every_gpu_that_is_promised_has_figures(self):
        promised = {"l4", "l40s", "a10", "a100", "h100", "h200", "b200", "b300", "gb200", "orin", "thor"}
        assert promised | {"rtx-pro-6000"} <= {*gpu_names()}

    @pytest.mark.parametrize("wrong", ["", "1", "1:2:3", "a:b", "0:5", "5:-1", "nan:1", "1:inf"])
    def test_figures_of_another_gpu_are_two_numbers(self, wrong):
        peaks = parse_peaks("362:864")
        assert (peaks.peak_flops("bf16"), peaks.bandwidth) == (362e12, 864e9)
        with pytest.raises(DeployError, match="two numbers"):
            parse_peaks(wrong)

    @pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB", "H100 PCIe"])
    def test_another_card_of_the_family_is_not_taken_for_it(self, name):
        with pytest.raises(DeployError):
            find_peaks(name)


def made_up_gpu():
    figures = {"fp16_tflops": 0.001, "bf16_tflops": 0.002, "fp32_tflops": 0.0005, "memory_gb_per_s": 0.1}
    return GpuPeaks(name="slow", compute_capability="0.0", source="made up", **figures)


class TestRoofline:
    def test_bound_by_hand(self):
        found = analyze_layer(make_spec(), {"B": 1, "S": 3}, "fp16", made_up_gpu())
        projections, attention, output = found.bound
        # 1 GFLOP/s and 0.1 GB/s: FLOP/byte above 10 would be bound by compute
        assert projections.seconds == pytest.approx(216 / 1e8)
        assert projections.compute_seconds == pytest.approx(288 / 1e9)
        assert {item.bound_by for item in (projections, attention, output)} == {"memory"}
        assert found.seconds == pytest.approx((216 + 96 + 88) / 1e8)
        assert found.tokens_per_second == pytest.approx(3 / found.seconds)

    def test_a_larger_batch_is_compute_bound(self):
        def bounds(B):
            stages = analyze_layer(spec, {"B": B, "S": 1}, "fp16", "h200").bound
            return {item.cost.name: item.bound_by for item in stages}

        spec = make_spec(E=4096, Hq=32, Hkv=8, D=128)
        assert set(bounds(1).values()) == {"memory"}
        many = bounds(2048)
        assert (many["projections"], many["output"]) == ("compute", "compute")
        assert many["attention"] == "memory"  # one query per batch element: batching shares no keys

    def test_precision_sets_both_rates(self):
        spec, sizes = make_spec(E=512, Hq=8, Hkv=8, D=64), {"B": 4, "S": 512}
        half, single = (analyze_layer(spec, sizes, name, "h200") for name in ("fp16", "fp32"))
        assert single.cost.bytes == 2 * half.cost.bytes
        assert single.cost.flops == half.cost.flops
        first = analyze_layer(spec, sizes, "bf16", made_up_gpu()).bound[0]
        assert first.compute_seconds == pytest.approx(half.cost.stages[0].flops / 2e9)

    def test_unknown_precision_is_refused(self):
        with pytest.raises(DeployError, match="fp16"):
            analyze_layer(make_spec(), {"B": 1, "S": 1}, "fp61", "h200")


class TestRender:
    def test_json_round_trips_and_agrees(self):
        analysis = analyze_layer(find_spec("llama-3-8b"), {"B": 2, "S": 2048}, "fp16", "h100")
        data = json.loads(json.dumps(analysis.to_dict()))
        assert data["total"]["bound_seconds"] == pytest.approx(
            sum(s["bound_seconds"] for s in data["stages"])
        )
        assert data["total"]["parameters"] == sum(s["parameters"] for s in data["stages"]) == 41_943_040
        assert data["kv_cache"] == {"bytes_per_token": 4096, "bytes": 4096 * 2048 * 2}
        assert data["gpu"]["bandwidth"] == 3.35e12

    def test_table_fits_a_terminal(self):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(
            analysis_renderable(analyze_layer(find_spec("llama-3-8b"), {"B": 1, "S": 2048}, "fp16", "h200"))
        )
        text = console.export_text()
        assert "…" not in text
        for word in ("projections", "25.2 M", "103", "1,117", "compute", "not a prediction", "4,096 bytes"):
            assert word in text


def test_importing_the_package_is_light():
    code = (
        "import sys, mha_deploy.analysis; "
        "print([m for m in ('torch', 'matplotlib', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
