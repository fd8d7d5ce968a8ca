"""The records of a report that say what engines became and how fast everything is."""

from __future__ import annotations

from mha_deploy.report.fields import FLAG, NUMBER, SIZES, TEXT, TEXTS, WHOLE, field, list_of, maybe
from mha_deploy.report.shape import ListOf, MapOf, OneOf, Record

ENGINE = {
    "name": field(TEXT, "name of the engine in the bundle"),
    "backend": field(TEXT, "`tensorrt` or `tensorrt-rtx`"),
    "version": field(TEXT, "version of the TensorRT that built it"),
    "precision": field(TEXT, "the precision asked for"),
    "built": field(TEXT, "where or for what it was built"),
    "ran": field(FLAG, "whether it was run here"),
    "why_not": maybe(TEXT, "why it was not run; null if it was"),
    "fused": field(
        ListOf(item=WHOLE), "two numbers: attentions that are fused in every profile, of how many"
    ),
    "precision_status": field(TEXT, "`really-fp16` (or what was asked for), `mixed` or `unknown`"),
    "nodes": list_of(
        {
            "node": field(TEXT, "name of the attention node"),
            "profile": maybe(WHOLE, "the optimisation profile; null where there are none"),
            "status": field(OneOf(options=("fused", "decomposed", "unknown")), "what became of it"),
            "kernels": field(TEXTS, "the kernels that prove it"),
            "reason": field(TEXT, "why it is unknown, or how it is known; may be empty"),
            "source": field(TEXT, "who told: `log`, `plan`, `inspector`, `profile`, joined by `+`"),
        },
        "one for every attention node and profile",
    ),
    "seconds": maybe(NUMBER, "how long the build took, seconds; null where that is not known"),
    "engine_bytes": maybe(WHOLE, "size of the plan, bytes; null where there is none"),
    "profiles": field(ListOf(item=MapOf(item=TEXT)), "axis ranges of each profile, as `min:opt:max`"),
    "attention": field(TEXT, "who computes attention and projections, and what was measured to choose"),
    "plugins": field(TEXTS, "the plugin libraries that it needs: file, version, hash and plugins"),
    "profile_names": field(TEXTS, "what each profile is called: its number, or `prefill` and `decode`"),
}

CONDITIONS = {
    "sm_mhz": maybe(NUMBER, "clock of the multiprocessors, MHz; null where NVML did not say"),
    "sm_mhz_max": maybe(NUMBER, "the highest that the card goes to, MHz; null as above"),
    "memory_mhz": maybe(NUMBER, "clock of the memory, MHz; null as above"),
    "temperature_c": maybe(NUMBER, "temperature of the GPU, °C; null as above"),
    "power_w": maybe(NUMBER, "power drawn, W; null as above"),
    "held_back": field(TEXTS, "why the clocks were lower than they could be"),
}

TIMING = {
    "p50_us": field(NUMBER, "median time of one call, µs"),
    "p90_us": field(NUMBER, "time that 90 % of the samples did not exceed, µs"),
    "p99_us": field(NUMBER, "time that 99 % of the samples did not exceed, µs"),
    "samples": field(WHOLE, "how many samples"),
    "calls_per_sample": field(WHOLE, "calls in one sample; a sample is their mean"),
    "slots": field(WHOLE, "copies of the inputs that the calls rotated through"),
    "graph": field(FLAG, "whether the calls were launches of a CUDA graph"),
    "why_no_graph": maybe(TEXT, "why they were not although they should have been; null otherwise"),
    "stable": field(FLAG, "whether warming up ended with rounds that agreed"),
    "host_us": maybe(NUMBER, "host time of one launch, µs; null where it was not measured"),
    "gpu": field(TEXT, "the GPU"),
    "conditions": field(Record(fields=CONDITIONS), "clocks, temperature and power while it ran"),
    "memory_bytes": maybe(WHOLE, "device memory held for it, bytes; null where that is not known"),
}

ROW = {
    "name": field(TEXT, "short name, the same at every point"),
    "backend": field(TEXT, "what ran, with its version"),
    "family": field(OneOf(options=("pytorch", "onnxruntime", "tensorrt", "onnx")), "whose it is"),
    "refused": maybe(TEXT, "why it was not timed; null if it was"),
    "timing": maybe(Record(fields=TIMING), "the measurement; null if it was refused"),
    "speedup_over_eager": maybe(NUMBER, "eager's p50 over this one; null where one is missing"),
    "speedup_over_best_pytorch": maybe(NUMBER, "best PyTorch row's p50 over this one; null as above"),
    "tflops": maybe(NUMBER, "10¹² FLOP/s at p50; null if it was refused"),
    "gb_per_s": maybe(NUMBER, "10⁹ bytes/s at p50, counting the bytes of the point; null as above"),
    "tokens_per_s": maybe(
        NUMBER, "tokens/s through this layer at p50, all rows of the batch; null where it is no decode step"
    ),
    "roofline_share": maybe(NUMBER, "floor over p50; null where there is no roofline"),
    "kernels": list_of(
        {
            "name": field(TEXT, "name of the kernel"),
            "calls": field(NUMBER, "how often one call launches it"),
            "microseconds": field(NUMBER, "its time in one call, µs"),
        },
        "the longest kernels of one call; empty where no profiler looked",
    ),
}

ROOFLINE = {
    "gpu": field(TEXT, "whose peak figures"),
    "floor_us": field(NUMBER, "least time of the layer, stage after stage, µs"),
    "bound": field(OneOf(options=("compute", "memory")), "what sets most of the floor"),
    "tflops_peak": field(NUMBER, "peak rate in this precision, 10¹² FLOP/s"),
    "gb_per_s_peak": field(NUMBER, "memory bandwidth, 10⁹ bytes/s"),
}

LATENCY = {
    "gpu": maybe(TEXT, "the GPU; null where every row was refused"),
    "points": list_of(
        {
            "case": field(TEXT, "name of the case"),
            "sizes": field(SIZES, "axis sizes"),
            "past": maybe(
                WHOLE, "most rows of a static cache that were valid before the call; null where there is none"
            ),
            "flops": field(NUMBER, "operations of one call"),
            "bytes": field(NUMBER, "bytes that one call must move"),
            "roofline": maybe(Record(fields=ROOFLINE), "the floor; null for a GPU without known figures"),
            "rows": list_of(ROW, "everything that was timed or refused"),
        },
        "one for every size that was timed",
    ),
}
