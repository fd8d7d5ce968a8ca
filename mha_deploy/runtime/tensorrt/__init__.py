"""TensorRT 8.6 to 11 and TensorRT-RTX: `build.py` builds an engine, `run.py` runs it, `verdict.py` judges it.

`versions.py` holds what the versions differ in, probed by name; `kernels.py` and `log.py` read what an engine
became.
"""
