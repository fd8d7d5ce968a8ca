"""Parts of an example report: decoding."""

import random

from example_results import engine_of, verdict


def decode(runtime, *, level=8e-4, steps=300, growth=1.3, prompt=(24, 12, 6), trace="steps"):
    """A trace that was decoded through rightly."""
    dice = random.Random(f"{runtime} {trace}")
    own, eager = random.Random(trace), 9e-4
    errors = [level * growth ** (i / steps) * dice.uniform(0.7, 1.4) for i in range(steps)]
    eager_errors = [eager * 1.2 ** (i / steps) * own.uniform(0.7, 1.4) for i in range(steps)]
    shown = sorted({*(2**k for k in range(steps.bit_length())), steps} - {0})
    return {
        "model": "bert-base",
        "precision": "fp16",
        "runtime": runtime,
        "engine": engine_of(runtime),
        "trace": trace,
        "outcome": "passed",
        "prompt": list(prompt),
        "steps": steps,
        "first_failed": None,
        "share": 0.43,
        "errors": errors,
        "eager_errors": eager_errors,
        "growth": growth,
        "eager_growth": 1.2,
        "table": [[step, errors[step - 1]] for step in shown],
        "judged": steps + 3,
        "failed": 0,
        "failures": [],
        "clients": None,
    }


def break_decode(data, step=17, *, failed=286):
    """The same trace, wrong from one step on."""
    data["errors"][step - 1 :] = [1.1 for _ in data["errors"][step - 1 :]]
    wrong = verdict(f"{data['trace']} step {step}", 3, 1, 120.0)
    reason = {"kind": "out of budget", "names": ["relative_l2"], "worst": "row 1, token 0"}
    wrong |= {"outcome": "failed", "reason": reason, "sizes": {"B": 3, "S": 1, "T": 512}}
    data |= {"outcome": "failed", "first_failed": step, "share": 120.0, "growth": 1375.0, "failed": failed}
    data |= {"table": [[at, data["errors"][at - 1]] for at, _ in data["table"]], "failures": [wrong]}
    return data
