"""Parts of an example report: what was checked."""

import random


def finding(level, section, text):
    kinds = {"parity": "wrong outputs", "fusion": "engine not fused", "latency": "not settled"}
    kinds |= {"range": "fp16 range", "invariance": "not invariant", "engine": "engine not run"}
    about = {"place": {"runner": "tensorrt 8.6.1"}, "reason": None, "names": [], "numbers": {}, "detail": ""}
    return {"level": level, "section": section, "kind": kinds[section], **about, "text": text}


def model():
    return {
        "name": "bert-base",
        "summary": "BERT base: bidirectional self-attention with a padding mask",
        "kind": "MHA",
        "precision": "fp16",
        "quantized": None,
        "spec": {
            "name": "bert-base",
            "Hq": 12,
            "Hkv": 12,
            "D": 64,
            "E": 768,
            "bias": True,
            "mask": "padding",
            "axes": {"B": {"min": 1, "opt": 8, "max": 32}, "S": {"min": 1, "opt": 128, "max": 512}},
        },
        "bundle": "bert-base-fp16",
        "bundle_sha256": "9f2c0d7be4a1" + "0" * 52,
        "weights": "random, seed 0",
    }


def environment(*, gpu):
    card = {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "l2_bytes": 62914560,
        "memory_bytes": 150754820096,
    }
    return {
        "gpu": card if gpu else None,
        "driver": "580.159.04" if gpu else None,
        "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
        "python": "3.11.2",
        "versions": {
            "mha-deploy": "0.1.0",
            "torch": "2.11.0",
            "onnx": "1.20.0",
            "onnxruntime": "1.31.1",
            "tensorrt": "8.6.1",
            "numpy": "2.3.4",
        },
    }


CASES = {"min": (1, 1), "opt": (8, 128), "odd": (3, 37), "ragged": (4, 24), "large": (16, 512)}


def engine_of(runtime):
    """The engine that ran, by the name of its runtime."""
    return "tensorrt" if runtime.startswith("tensorrt ") else None


def parity(runtime, share):
    verdicts = [
        verdict(case, *sizes, share * (1 + 0.07 * i)) for i, (case, sizes) in enumerate(CASES.items())
    ]
    return {
        "model": "bert-base",
        "precision": "fp16",
        "runtime": runtime,
        "engine": engine_of(runtime),
        "cases": "golden",
        "outcome": "passed",
        "accumulation": {"type": "fp32", "why": "ONNX Runtime accumulates in FP32"},
        "verdicts": verdicts,
        "clients": None,
    }


def verdict(case, batch, length, share):
    budget = {"relative_l2": 6.4e-3, "worst_vector": 1.1e-2, "max_abs": 6.2e-2, "gain": 3.9e-4}
    budget |= {"local": 4.0, "local_gain": 4.0}
    deviation = {name: share * limit * 0.8 for name, limit in budget.items()} | {
        "relative_l2": share * 6.4e-3
    }
    deviation |= {
        "local_at": f"query {length // 2}",
        "cosine": 1 - (share * 6.4e-3) ** 2 / 2,
        "worst_index": [0, length // 2, 511],
        "worst_got": 1.2344,
        "worst_want": 1.2361,
    }
    return {
        "case": case,
        "sizes": {"B": batch, "S": length},
        "output": "output",
        "outcome": "passed",
        "reason": None,
        "deviation": deviation,
        "budget": budget,
        "share": share,
    }


def break_verdict(data, share):
    reason = {"kind": "out of budget", "names": ["relative_l2", "gain"]}
    data |= {"outcome": "failed", "reason": reason, "share": share}
    data["deviation"] |= {
        "relative_l2": share * 6.4e-3,
        "gain": share * 3.9e-4,
        "cosine": 0.98,
        "worst_got": -3.75,
        "worst_want": 1.2361,
    }


def heatmap(runtime, size):
    dice = random.Random(runtime)
    values = [[size * (0.5 + 0.08 * head + 0.6 * dice.random()) for _ in range(32)] for head in range(12)]
    return {
        "runtime": runtime,
        "engine": engine_of(runtime),
        "case": "opt",
        "output": "output",
        "rows": "head",
        "columns": "position",
        "values": values,
        "bin": 4,
        "note": "the error is taken before the output projection",
    }


def invariance(check, *, bitwise, share, **varied):
    nothing = {"variation": None, "obstacle": None, "batch": 8, "other_batch": None, "arrangements": None}
    return {
        "runtime": "tensorrt 8.6.1",
        "engine": "tensorrt",
        "case": "opt",
        "check": check,
        **nothing,
        "elements": [],
        "profiles": [],
        **varied,
        "outcome": "passed",
        "bitwise": bitwise,
        "share": share,
        "problem": None,
    }


def conformance():
    about = {
        "none": "no mask",
        "padding": "padding, boolean",
        "additive": "additive, float",
        "causal": "causal",
        "causal-padding": "causal and padding",
        "dead-row": "a fully masked query",
        "alibi": "ALiBi bias",
        "native-causal": "causal as the runtime itself means it",
    }
    names = ("onnx-reference", "ort-cpu", "tensorrt", "tensorrt-rtx")
    rows = [
        {"case": case, "about": words, "diagnostic": case.startswith("native"), "cells": mask_cells(names)}
        for case, words in about.items()
    ]
    rows[5]["cells"]["ort-cpu"] = cell("wrong", "NaN where ONNX defines zeros")
    rows[4]["cells"]["tensorrt"] = cell("refused", "takes a mask or causal, not both")
    rows[7]["cells"]["tensorrt"] = cell("wrong", "aligned to the lower right", 0.71, 212.0)
    return {"precision": "fp16", "seed": 0, "outcome": "failed", "columns": list(names), "rows": rows}


def mask_cells(names):
    cells = {name: cell("conforms", "", 4.1e-4, 0.08) for name in names[:-1]}
    return cells | {names[-1]: cell("absent", "tensorrt_rtx is not installed")}


def cell(status, detail, error=None, share=None):
    return {"status": status, "detail": detail, "error": error, "share": share}


def fp16_range():
    advice = ["fold the scale into the query weights"]
    what = "the matmul q·k reaches 7276 before the scale"
    node = {
        "node": "attention",
        "status": "near",
        "largest_score_raw": 7276.4,
        "largest_score": 909.5,
        "largest_softmax_sum": 128.0,
        "max_keys": 512,
        "headroom": 9.0,
        "findings": [
            {
                "status": "near",
                "kind": "matmul",
                "name": "",
                "numbers": {"largest": 7276.4},
                "what": what,
                "advice": advice,
            }
        ],
        "advice": advice,
        "figures": {"tensors": {"Q": 31.2, "K": 28.9, "V": 4.0}, "scale": 0.125},
    }
    return {"precision": "fp16", "worst": "near", "nodes": [node]}
