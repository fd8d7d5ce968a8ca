"""`python -m mha_deploy`: the same as the command `mha-deploy`."""

from mha_deploy.cli import main

if __name__ == "__main__":
    main()
