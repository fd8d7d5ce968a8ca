"""Reports as runs would write them: a good one on a GPU, a failed one, one without a GPU, a hostile one."""

import copy
import math

from example_decode import break_decode, decode
from example_results import (
    break_verdict,
    conformance,
    environment,
    finding,
    fp16_range,
    heatmap,
    invariance,
    model,
    parity,
)
from example_speed import engine, latency, refuse

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`\u202egnp.exe\x00\ud800"


def passing():
    """A whole report from a machine with a GPU."""
    return {
        "format": 5,
        "tool": {
            "name": "mha-deploy",
            "version": "0.1.0",
            "command": ["mha-deploy", "validate", "my bundle"],
        },
        "created": "2026-11-15T05:00:00Z",
        "verdict": {
            "outcome": "passed",
            "not_verified": [
                {
                    "kind": "sizes not covered",
                    "axis": "S",
                    "least": 4097,
                    "most": 8192,
                    "text": "S = 4097–8192",
                }
            ],
            "headline": "right, 1/1 fused, precision: fp16 (verified), 1.20x faster than the best PyTorch",
            "findings": [
                finding("warning", "latency", "the clocks were held back (power cap) in 1 of 47 timings"),
                finding("warning", "range", "attention is within 9x of the largest FP16 number"),
                finding("note", "fusion", "the kernels of 2 matmuls are chosen on the device"),
                finding("note", "invariance", "the result of a row hangs on the batch size, within budget"),
            ],
        },
        "model": model(),
        "environment": environment(gpu=True),
        "parity": [parity("ort-cpu 1.31.1", 0.09), parity("tensorrt 8.6.1", 0.42)],
        "heatmaps": [heatmap("ort-cpu 1.31.1", 3e-4), heatmap("tensorrt 8.6.1", 1.4e-3)],
        "decode": [decode("ort-cpu 1.31.1"), decode("tensorrt 8.6.1", level=1e-3)],
        "invariance": [
            invariance("batch slot", bitwise=True, share=0.0, variation="slots", arrangements=7),
            invariance("batch size", bitwise=False, share=0.11, variation="batch", other_batch=1),
            invariance("profile", bitwise=False, share=0.24, variation="profiles", profiles=[0, 1]),
            invariance("batch size", bitwise=False, share=None, obstacle="no other batch", batch=None)
            | {"case": "", "runtime": "ort-cpu 1.31.1", "engine": None, "outcome": "not verified"},
        ],
        "runtimes": {"ort-cpu 1.31.1": "ort-cpu", "tensorrt 8.6.1": "tensorrt"},
        "conformance": conformance(),
        "range": fp16_range(),
        "fault": None,
        "engines": [engine()],
        "latency": latency(),
        "subjects": [],
        "loss": None,
        "data": None,
        "requirements": [],
        "serving": [],
        "notes": ["Weights are random; the shares of the budget do not hang on that."],
    }


def failing():
    """A report of an engine that is wrong, with values that are no numbers."""
    data = passing()
    data["verdict"] = {
        "outcome": "failed",
        "not_verified": [],
        "headline": "wrong: 3 of 10 outputs are out of budget on tensorrt 8.6.1",
        "findings": [
            finding("failure", "parity", "tensorrt 8.6.1: opt/output is at 8.05 budgets"),
            finding(
                "failure", "parity", "tensorrt 8.6.1: large/output has 12 values that are NaN or infinite"
            ),
            finding("failure", "fusion", "attention is decomposed in profile 1"),
            *data["verdict"]["findings"],
        ],
    }
    _, wrong = data["parity"]
    wrong["outcome"] = "failed"
    break_verdict(wrong["verdicts"][1], 8.05)
    break_verdict(wrong["verdicts"][2], 1603.7)
    wrong["verdicts"][4] |= {
        "outcome": "failed",
        "reason": {"kind": "not finite", "numbers": {"count": 12}, "index": [0, 3, 17]},
        "deviation": None,
        "budget": None,
        "share": math.inf,
    }
    values = data["heatmaps"][1]["values"]
    values[5] = [0.31 + 0.01 * (i % 5) for i in range(len(values[5]))]
    values[7][3:6] = [math.nan, math.inf, None]
    break_decode(data["decode"][1])
    data["invariance"][1] |= {"outcome": "failed", "share": 3.4, "problem": "rows differ by 3.4 budgets"}
    data["range"]["worst"] = "overflows"
    data["range"]["nodes"][0] |= {
        "status": "overflows",
        "largest_score_raw": math.inf,
        "headroom": 0.4,
        "advice": ["fold the scale into the query weights", "or build with BF16"],
    }
    data["fault"] = {
        "at_fault": "fusion",
        "explanation": "The unfused twin of the engine is right, and so is ONNX Runtime on the same graph.",
        "trials": [
            {"name": "canonical graph on ort-cpu", "outcome": "passed", "share": 0.09, "reason": None},
            {"name": "unfused twin, fp16", "outcome": "passed", "share": 0.4, "reason": None},
            {"name": "fused, fp32", "outcome": "failed", "share": 7.9, "reason": None},
        ],
    }
    node = {
        **data["engines"][0]["nodes"][0],
        "profile": 1,
        "status": "decomposed",
        "sources": ["plan", "inspector"],
    }
    node["kernels"] = ["__myl_SelSliResAddMaxSubExpSumDivMul_0xfd94810cc91c9f22d8306d0a155b1f39"]
    data["engines"][0] |= {"fused": [0, 1], "nodes": [*data["engines"][0]["nodes"], node]}
    for row in (point["rows"][7] for point in data["latency"]["points"]):
        refuse(row, "wrong answer: out of budget: relative_l2, gain")
    return data


def cpu_only():
    """A report from a machine without a GPU: the graph was checked, the engine was only built."""
    data = passing()
    why = "there is no NVIDIA GPU on this machine"
    data["verdict"] = {
        "outcome": "not verified",
        "not_verified": [{"kind": "not run", "name": "tensorrt-rtx", "text": "engine tensorrt-rtx"}],
        "headline": "the graph is right; the engine was built and inspected, but not run",
        "findings": [finding("note", "engine", f"tensorrt-rtx was not run: {why}")],
    }
    data["environment"] = environment(gpu=False)
    data["parity"] = data["parity"][:1]
    data |= {
        "heatmaps": [],
        "decode": [],
        "invariance": [],
        "conformance": None,
        "range": None,
        "latency": None,
        "notes": [],
    }
    data["engines"][0] |= {
        "name": "tensorrt-rtx",
        "backend": "tensorrt-rtx",
        "version": "1.7.1.116",
        "built": "for RTX GPUs from compute capability 8.0 on",
        "ran": False,
        "why_not": why,
    }
    return data


def empty():
    """A report of a run in which nothing could be run."""
    data = cpu_only()
    data["verdict"] = {"outcome": "not verified", "headline": "nothing was run", "findings": []}
    data["verdict"]["not_verified"] = []
    return data | {"parity": [], "engines": []}


def hostile():
    """Every text of a failed report is an attack."""

    def poison(value, key=""):
        if isinstance(value, dict):
            free = key in ("versions", "spec", "sizes", "cells")
            return {
                (f"{name}{HOSTILE}" if free else name): poison(item, name) for name, item in value.items()
            }
        if isinstance(value, list):
            return [poison(item, key) for item in value]
        words = (
            "level",
            "outcome",
            "section",
            "kind",
            "cases",
            "check",
            "status",
            "precision_status",
            "worst",
            "at_fault",
            "family",
            "bound",
            "sources",
            "variation",
            "obstacle",
        )
        return f"{value}{HOSTILE}" if isinstance(value, str) and key not in words else value

    return poison(failing())


def bench():
    """A benchmark of two models."""
    names = ("bert-base", "gpt2")
    timed = {"engines": [engine()], "throughput": []}
    entries = [
        {"model": model() | {"name": n}, **timed, "latency": latency(i), "absent": []}
        for i, n in enumerate(names)
    ]
    return {
        "format": 5,
        "tool": {"name": "mha-deploy", "version": "0.1.0"},
        "created": "2026-11-15T05:00:00Z",
        "environment": environment(gpu=True),
        "models": entries,
    }


EXAMPLES = {"passing": passing, "failing": failing, "cpu-only": cpu_only, "empty": empty, "hostile": hostile}


def fresh(name):
    """A copy of an example that a test may change."""
    return copy.deepcopy(EXAMPLES[name]())
