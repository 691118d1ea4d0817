"""The pages of the documentation as their readers see them: blocks of code, commands, flags.

Knows Markdown as far as these pages use it; knows no command.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNS = "<!-- runs -->"


@dataclass(frozen=True)
class Block:
    """Some lines of code.

    Args:
        page: where it stands.
        line: number of its first line there.
        language: of its fence; empty if none is said, or if it is indented.
        text: without fence or indent.
        runs: whether the line above its fence is `RUNS`.
    """

    page: Path
    line: int
    language: str
    text: str
    runs: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> Iterator[str]:
        """Its commands of kvspan, each on one line, without a prompt."""
        whole = re.sub(r"\\\n\s*", "", self.text)
        for line in whole.splitlines():
            if line.removeprefix("$ ").startswith("kvspan "):
                yield line.removeprefix("$ ")


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page, in order."""
    found = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        begin, line = number + 1, lines[number]
        if line.startswith("```"):
            end = lines.index("```", begin)
            text = "\n".join(lines[begin:end])
            runs = number > 0 and lines[number - 1].strip() == RUNS
            found.append(Block(page, begin + 1, line[3:].strip(), text, runs))
            number = end + 1
        elif line.startswith("    kvspan "):
            end = next(
                (n for n in range(begin, len(lines)) if not lines[n].startswith("    ")), len(lines)
            )
            text = "\n".join(text[4:] for text in lines[number:end])
            found.append(Block(page, begin, "", text))
            number = end
        else:
            number += 1
    return found


def spans(page: Path) -> list[str]:
    """What stands between backticks in the prose of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
