"""`python -m mha_deploy`: the same as the command `mha-deploy`."""

import gc
import os

from mha_deploy.process import defer_imports, forget_working_folder


def main() -> None:
    """Run the command line, with nothing of the working folder on the path of modules."""
    forget_working_folder()
    from mha_deploy.supervisor import supervise

    supervise(_run)


def _run() -> None:
    # PyTorch and its exporter are a million objects that stay: to look for garbage among them while they are
    # imported takes an eighth of the time.
    gc.set_threshold(50_000, 20, 100)
    # A thread of PyTorch or NumPy that has nothing to do leaves its core to the children, and to the other
    # threads. By itself OpenBLAS keeps a core busy for 2^26 cycles after each norm of ten thousand numbers.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    defer_imports()
    from mha_deploy.cli import main

    main()


if __name__ == "__main__":
    main()
