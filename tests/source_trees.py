"""The source of the package as trees, parsed once for all tests that look for something in it."""

import ast
from functools import cache
from pathlib import Path

import mha_deploy

PACKAGE = Path(mha_deploy.__file__).parent


@cache
def source_trees():
    """The tree of every file, by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def nodes_of(name):
    """All nodes of a file."""
    return list(ast.walk(source_trees()[name]))
