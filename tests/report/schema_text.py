"""docs/report.md from the records: `python tests/report/schema_text.py` writes its tables anew."""

from pathlib import Path

import msgspec

from mha_deploy.validation.records import BenchRecord, ReportRecord

PATH = Path(__file__).parents[2] / "docs" / "report.md"
MARK = "<!-- written from the records by tests/report/schema_text.py -->\n"
FILES = {"report.json": ReportRecord, "bench.json": BenchRecord}
MOST_OPTIONS = 12

_PLAIN = {each: each for each in ("string", "boolean", "integer", "number")}


class Document:
    """The tables of all records, each record once, by the file and the place where it is first."""

    def __init__(self, *files):
        self.places, self.parts = {}, []
        chosen = {file: FILES[file] for file in files or FILES}
        roots, self.known = msgspec.json.schema_components(chosen.values(), ref_template="{name}")
        for file, root in zip(chosen, roots, strict=True):
            self.add(f"## {file}", "", root["$ref"])

    def add(self, heading, place, name):
        """The table of a record, then those of the records in it."""
        self.places[name] = place
        schema, inner = self.known[name], []
        lines = [heading, "", schema["description"], "", "| key | type | meaning |", "|---|---|---|"]
        for key, kind in schema["properties"].items():
            path = f"{place}.{key}" if place else key
            label = self.label(kind, path, inner)
            lines.append(f"| `{key}` | {label} | {kind['description'].replace('|', chr(92) + '|')} |")
        self.parts.append("\n".join(lines) + "\n")
        for path, other in inner:
            if other not in self.places:
                self.add(f"### `{path}`", path, other)

    def label(self, kind, place, inner):
        """A kind in a few words; the keys of a record have a table of their own."""
        if "anyOf" in kind:
            first, *others = kind["anyOf"]
            assert others == [{"type": "null"}], place
            return f"{self.label(first, place, inner)}, or null"
        if "$ref" in kind:
            name = kind["$ref"]
            if "enum" in self.known[name]:
                return self.label(self.known[name], place, inner)
            inner.append((place, name))
            known = self.places.get(name)
            return "record" if known is None else f"record, as `{known}`"
        if "enum" in kind:
            few = [f"`{option}`" for option in kind["enum"]]
            return ", ".join(few) if len(few) <= MOST_OPTIONS else "string, one of a list"
        if kind.get("type") == "array":
            items = kind.get("prefixItems") or [kind["items"]]
            words = [self.label(each, f"{place}[]", inner) for each in items]
            return f"list of {' and '.join(dict.fromkeys(words))}"
        if kind.get("type") == "object":
            return f"name → {self.label(kind.get('additionalProperties') or {}, f'{place}.*', inner)}"
        return _PLAIN[kind["type"]] if "type" in kind else "any"


def written():
    """The whole document, with its tables as the records have them."""
    before, mark, _ = PATH.read_text(encoding="utf-8").partition(MARK)
    return before + mark + "\n" + "\n".join(Document().parts)


if __name__ == "__main__":
    PATH.write_text(written(), encoding="utf-8")
