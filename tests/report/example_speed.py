"""Parts of an example report: engines and times."""

import random

ROWS = (
    ("eager", "torch 2.11.0 eager", "pytorch", 5.2),
    ("sdpa-math", "torch 2.11.0 SDPA math", "pytorch", 4.6),
    ("sdpa-efficient", "torch 2.11.0 SDPA efficient", "pytorch", 2.1),
    ("sdpa-flash", "torch 2.11.0 SDPA flash", "pytorch", 1.72),
    ("sdpa-cudnn", "torch 2.11.0 SDPA cuDNN", "pytorch", 1.65),
    ("compile", "torch 2.11.0 compile, max-autotune", "pytorch", 1.5),
    ("onnxruntime-cuda", "ort-cuda 1.24.1", "onnxruntime", 2.4),
    ("tensorrt", "tensorrt 8.6.1", "tensorrt", 1.25),
)
WHY_NO_GRAPH = "This session cannot use the graph capture feature as requested by the user"
SWEEP = [(batch, length) for batch in (1, 8) for length in (128, 512, 2048)]
KERNELS = (
    ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", 2, 0.52),
    ("flash_fwd_kernel<cutlass::half_t, 64, 128, 128, 4, false, false, true>", 1, 0.37),
    ("elementwise_kernel<4, add_bias>", 1, 0.07),
)


def engine():
    kernel = "_gemm_mha_v2_0xfd94810cc91c9f22d8306d0a155b1f39"
    node = {
        "node": "attention",
        "profile": 0,
        "status": "fused",
        "kernels": [kernel],
        "reasons": [],
        "sources": ["log", "plan"],
    }
    return {
        "name": "tensorrt",
        "backend": "tensorrt",
        "version": "8.6.1",
        "precision": "fp16",
        "built": "on NVIDIA H200",
        "ran": True,
        "why_not": None,
        "fused": [1, 1],
        "precision_status": "verified",
        "precision_reasons": [],
        "nodes": [node],
        "seconds": 12.13,
        "engine_bytes": 5812344,
        "profiles": [{"B": "1:8:32", "S": "1:128:512"}],
        "attention": "native, TensorRT's own projections",
        "plugins": [],
        "profile_names": ["0"],
        "rebuilds": None,
    }


def latency(seed=0):
    dice = random.Random(seed)
    return {"gpu": "NVIDIA H200", "points": [point(batch, length, dice) for batch, length in SWEEP]}


def point(batch, length, dice):
    tokens, width = batch * length, 768
    flops = 8 * tokens * width**2 + 4 * batch * length**2 * width
    count = 2 * (4 * width**2 + 8 * tokens * width)
    floor = max(flops / 989.5e6, count / 4.8e6)
    rows = [row(entry, flops, count, floor, length, dice) for entry in ROWS]
    best = min(r["timing"]["p50_us"] for r in rows if r["family"] == "pytorch")
    for r in rows:
        r["speedup_over_eager"] = rows[0]["timing"]["p50_us"] / r["timing"]["p50_us"]
        r["speedup_over_best_pytorch"] = best / r["timing"]["p50_us"]
    if length == 2048:
        refuse(rows[4], "No available kernel. Aborting execution.")
    return {
        "case": "opt" if (batch, length) == (8, 128) else f"{batch}x{length}",
        "sizes": {"B": batch, "S": length},
        "past": None,
        "flops": flops,
        "bytes": count,
        "roofline": {
            "gpu": "H200",
            "bound_us": floor,
            "bound": "compute" if flops / 989.5e6 > count / 4.8e6 else "memory",
            "tflops_peak": 989.5,
            "gb_per_s_peak": 4800,
        },
        "rows": rows,
    }


def row(entry, flops, count, floor, length, dice):
    name, runtime, family, factor = entry
    worse = 1 + length / 900 if name in ("eager", "sdpa-math") else 1
    p50 = (9 + 1.4 * floor) * factor * worse * dice.uniform(0.94, 1.06)
    timing = {
        "p50_us": p50,
        "p90_us": p50 * dice.uniform(1.01, 1.06),
        "p99_us": p50 * dice.uniform(1.07, 1.25),
        "samples": 200,
        "calls_per_sample": max(1, int(100 / p50)),
        "slots": 21,
        "graph": name not in ("eager", "onnxruntime-cuda"),
        "why_no_graph": WHY_NO_GRAPH if name == "onnxruntime-cuda" else None,
        "stable": True,
        "host_us": 3.1 if name != "eager" else 88.0,
        "gpu": "NVIDIA H200",
        "conditions": {
            "sm_mhz": 1980,
            "sm_mhz_max": 1980,
            "memory_mhz": 3201,
            "temperature_c": 41,
            "power_w": 321.4,
            "throttled_by": ["power cap"] if length == 2048 and name == "eager" else [],
        },
        "memory_bytes": 25_000_000 if family != "pytorch" else None,
    }
    kernels = [{"name": k, "calls": c, "microseconds": share * p50} for k, c, share in KERNELS]
    return {
        "name": name,
        "runtime": runtime,
        "family": family,
        "refused": None,
        "timing": timing,
        "speedup_over_eager": None,
        "speedup_over_best_pytorch": None,
        "tflops": flops / p50 / 1e6,
        "gb_per_s": count / p50 / 1e3,
        "tokens_per_s": None,
        "roofline_share": floor / p50,
        "kernels": kernels,
    }


def refuse(data, reason):
    empty_values = {
        "timing": None,
        "speedup_over_eager": None,
        "speedup_over_best_pytorch": None,
        "tflops": None,
        "gb_per_s": None,
        "tokens_per_s": None,
        "roofline_share": None,
        "kernels": [],
    }
    data |= {"refused": reason, **empty_values}
