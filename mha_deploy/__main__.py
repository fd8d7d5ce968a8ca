"""`python -m mha_deploy`: the same as the command `mha-deploy`."""

from mha_deploy.process import forget_working_folder


def main() -> None:
    """Run the command line, with nothing of the working folder on the path of modules."""
    forget_working_folder()
    from mha_deploy.supervisor import supervise

    supervise(_run)


def _run() -> None:
    from mha_deploy.cli import main

    main()


if __name__ == "__main__":
    main()
