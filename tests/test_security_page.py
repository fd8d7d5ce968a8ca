"""Every statement of docs/security.md names the tests that fail where it is not true."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
LIMITS = "What remains"  # what the tool does not do, which nothing can test


def statements(text):
    """The paragraphs and list items below the headings of a page, each with the names of its tests."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        if heading == LIMITS:
            continue
        for block in re.split(r"\n\n+|\n(?=- )", body.strip()):
            comment = re.search(r"<!-- tests:([^>]*)-->\s*\Z", block)
            yield block.partition("\n")[0], comment[1].split() if comment else []


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def unproven(text):
    """What is wrong with the tests of each statement."""
    for statement, names in statements(text):
        if not names:
            yield f"no test: {statement}"
        for name in names:
            path, _, function = name.partition("::")
            if not (ROOT / path).is_file() or not function.startswith("test_"):
                yield f"no such file, or no test in it: {name}"
            elif function not in functions_of(path):
                yield f"no such test: {name}"


def test_every_statement_has_tests():
    text = PAGE.read_text(encoding="utf-8")
    assert len(list(statements(text))) > 20
    assert not list(unproven(text))


HERE = "tests/test_security_page.py::test_every_statement_has_tests"


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (f"- A claim.\n  <!-- tests: {HERE} -->", 0),
        (f"A claim.\n<!-- tests:\n{HERE}\n{HERE}\n-->\n\n- Another.\n  <!-- tests: {HERE} -->", 0),
        ("A claim.", 1),
        (f"- A claim.\n- Another.\n  <!-- tests: {HERE} -->", 1),
        (f"A claim.\n\nAnother.\n<!-- tests: {HERE} -->", 1),
        (f"- A claim.\n  <!-- tests: {HERE}_too -->", 1),
        ("- A claim.\n  <!-- tests: tests/absent.py::test_it -->", 1),
        ("- A claim.\n  <!-- tests: tests/test_security_page.py -->", 1),
    ],
)
def test_a_statement_without_a_test_is_found(body, wrong):
    assert len(list(unproven(f"# Page\n\nIntro.\n\n## Part\n\n{body}\n"))) == wrong
