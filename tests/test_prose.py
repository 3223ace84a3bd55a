"""Plain English: no banned phrase in texts and code; no sentence of over 30 words in pages, reports and docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ["README.md", "docs", "setup.py", "deqfast", "kernels", "csrc", "benchmarks", "experiments", "tests"]
KINDS = {".md", ".py", ".h", ".cuh", ".cpp", ".cu"}
LEFT_OUT = {Path(__file__), ROOT / "experiments" / "protocol.md"}  # the phrases themselves; a preregistration
MOST = 30  # words of a sentence in pages and docstrings
BANNED = [
    r"alone(?!:)|anew|batch mates?|beside|but for|comes? of it|for want of|goes? on|going on|hangs? on|held against",
    r"holds? good|in turns|is said (by|of)|none the less|once more|says? so|so many|so much as|speaks? of|told|upon",
    r"of torchdeq's(?! \w)|that of|(?<!left\s)(?<!leaves\s)(?<!lags\s)behind|none where|without an answer|whilst",
    r"(?<!there\s)(is|are) no(?! (longer|more|less)\b)|where (it|they) (is|are) no|where there (is|are)|what came of",
    r"ask(s|ed)? of|(answers?|asks?) whether|stands? (in|at|on|next|with)|tells? (of|that|where)",
]
RULE = re.compile(rf"\b({'|'.join(BANNED)})\b".replace(" ", r"\s+"), re.IGNORECASE)
NO_PROSE = r"```.*?```|\]\([^)]*\)|``.*?``|`.*?`|\$\$.*?\$\$|\$.*?\$|\\\[.*?\\\]|\\\(.*?\\\)|\"[^\"]*\"|https?:\S+"
NO_PROSE += r"|\{%.*?%\}|\{\{.*?\}\}"  # of templates
NO_PARAGRAPH = r"<!-- (?:numbers|findings).*?<!-- end of \w+ -->|<!--.*?-->|^=+ .*^=+ .*?$|^ *\w+ += .*?$"
NO_PARAGRAPH += r"|^ *(?:\||>>>|\.\.\. |:|!!!|\?\?\?|---|python |pytest |PYTHONPATH).*?$"
Text = tuple[int, str, bool]  # first line, text, whether the length of its sentences is limited


def masked(pattern: str, text: str) -> str:
    """Text with each match replaced by "x", and its line breaks kept."""
    return re.sub(pattern, lambda found: "x" + "\n" * found[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text: str, line: int = 1) -> Iterator[Text]:
    """Paragraphs, headings, items of lists and descriptions of arguments; no code, tables or generated blocks."""
    for part in re.split(r"\n(?=\s*\n|\s*(?:[-*+]|\d+\.|#+|[*\w, ]+:) )", masked(NO_PROSE, masked(NO_PARAGRAPH, text))):
        yield line, part, True
        line += part.count("\n") + 1


def of_python(text: str) -> Iterator[Text]:
    """Docstrings, other strings of at least three words, and comments."""
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if node in docstrings and isinstance(node, ast.Constant):
            yield from paragraphs(str(node.value), node.lineno)
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            string = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
            yield from [(node.lineno, string, False)] * (len(string.split()) > 2)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from ((one.start[0], masked(NO_PROSE, one.string), False) for one in tokens if one.type == tokenize.COMMENT)


def of_cpp(text: str) -> Iterator[Text]:
    yield from ((n, masked(NO_PROSE, line.partition("//")[2]), False) for n, line in enumerate(text.split("\n"), 1))


def faults(path: Path) -> Iterator[str]:
    for line, text, limited in {".md": paragraphs, ".py": of_python}.get(path.suffix, of_cpp)(path.read_text()):
        for found in RULE.finditer(text):
            yield f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, found.start())}: {found[0]!r}"
        for sentence in re.split(r"(?<!et al)(?<!e\.g)(?<!i\.e)[.!?][\"')*]*\s+", text.rstrip()) if limited else ():
            if (many := len(re.findall(r"[A-Za-z][\w'’-]+|\ba\b", sentence))) > MOST:
                at = line + text.count("\n", 0, text.index(sentence.lstrip()))
                yield f"{path.relative_to(ROOT)}:{at}: {many} words: {' '.join(sentence.split())}"


@pytest.mark.parametrize("place", PLACES)
def test_plain_english(place):
    paths = [ROOT / place] if "." in place else sorted((ROOT / place).rglob("*"))
    read = [path for path in paths if path.suffix in KINDS and path not in LEFT_OUT]
    found = [fault for path in read for fault in faults(path)]
    assert read and not found, "\n".join(found)
