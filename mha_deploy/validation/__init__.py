"""Is the result right, and how fast is it? Deviation, budget, parity, invariance, latency, verdict."""
