"""Plain English: no banned phrase in texts and code; no sentence of over 30 words in pages, reports and docstrings."""

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
PARAGRAPH = re.compile(r"\n(?=\s*\n|\s*(?:[-*+]|\d+\.|#+|[*\w, ]+:) )")
STRING = re.compile(r"[rf]*(\"\"\"|\"|')(.*)\1", re.DOTALL)


def masked(pattern: str, text: str) -> str:
    """Text with each match replaced by "x", and its line breaks kept."""
    return re.sub(pattern, lambda match: "x" + "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """First line and text of every piece of prose, and whether the length of its sentences is limited."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, masked(NO_PARAGRAPH, text), True
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING and (string := STRING.match(token.string)):
                docstring = string[1] == '"""' and token.line.lstrip().startswith(('"""', 'r"""'))
                prose = masked(NO_PARAGRAPH, string[2]) if docstring else masked(r"\{[^{}]*\}", string[2])
                yield from [(token.start[0], prose, docstring)] * (len(prose.split()) > 2)
            elif token.type == tokenize.COMMENT:
                yield token.start[0], token.string, False
    else:
        yield from ((n, line.partition("//")[2], False) for n, line in enumerate(text.split("\n"), 1))


def faults(path: Path) -> Iterator[str]:
    for line, raw, limited in texts(path):
        text = masked(NO_PROSE, raw)
        for match in RULE.finditer(text):
            yield f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}: {match[0]!r}"
        sentences = re.split(r"(?<!et al)(?<!e\.g)(?<!i\.e)[.!?][\"')*]*\s+", "\n\n. ".join(PARAGRAPH.split(text)))
        for sentence in sentences if limited else ():
            if (many := len(re.findall(r"[A-Za-z][\w'’-]+|\ba\b", sentence))) > MOST:
                yield f"{path.relative_to(ROOT)}: {many} words: {' '.join(sentence.split())}"


@pytest.mark.parametrize("place", PLACES)
def test_plain_english(place):
    paths = [ROOT / place] if "." in place else sorted((ROOT / place).rglob("*"))
    read = [path for path in paths if path.suffix in KINDS and path not in LEFT_OUT]
    assert read and not [fault for path in read for fault in faults(path)]
