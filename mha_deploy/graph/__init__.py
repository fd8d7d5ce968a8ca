"""Passes on the ONNX graph: read attention nodes, lower them to a target's dialect, check eligibility."""
