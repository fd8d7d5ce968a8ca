"""A hook of mkdocs: links from the pages to other files of the repository lead to it."""

import posixpath
import re

_LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """Turn links out of docs/ into links to the repository; those within it are mkdocs' own."""

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[1]))
        return link[0] if path.startswith("docs/") else f"]({config.repo_url}/blob/main/{path})"

    return _LINK.sub(absolute, markdown)
