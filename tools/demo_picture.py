"""Record ``jetspark demo`` in a terminal, and write the last screen as a picture: ``docs/demo.svg``, for the README.

    python tools/demo_picture.py                   # runs the demo as it is
    python tools/demo_picture.py --events 20000    # options go to the demo

A progress bar goes back over its own lines, so what comes out of the terminal is played on a small screen here first:
it knows the few sequences that rich writes.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
WIDTH, HEIGHT = 118, 80
TITLE = "make demo"
# Cursor up, erase the line, any other sequence; a carriage return or line feed; text.
PIECES = re.compile(r"\x1b\[(\d*)A|(\x1b\[2K)|(\x1b\[[0-9;]*m)|\x1b\[\??[0-9;]*[a-zA-Z]|([\r\n])|([^\x1b\r\n]+)")
# As rich's own, without fonts from elsewhere: a page with the picture asks nobody else for anything.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record(command: list[str]) -> tuple[int, str]:
    """Run a command in a terminal of its own; returns its exit code and all that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # its only other end is closed
            break
        if not piece:
            break
        written += piece
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode(errors="replace")


def last_screen(written: str) -> list[str]:
    """The lines that are there at the end, colours included."""
    lines, row, is_at_start = [""], 0, True
    for up, erase, colour, control, text in PIECES.findall(written):
        if control == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
            is_at_start = False
        elif control == "\r":
            is_at_start = True
        elif up:
            row = max(0, row - int(up))
        elif erase:
            lines[row] = ""
        elif colour or text:
            if is_at_start and text:
                lines[row] = ""
            lines[row] += colour or text
            is_at_start = is_at_start and not text
    return [line.rstrip() for line in lines]


def draw(lines: list[str]) -> str:
    while lines and not lines[-1]:
        lines.pop()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        return console.export_svg(title=TITLE, code_format=SVG, unique_id="demo")


def main() -> int:
    script = Path(sys.executable).with_name("jetspark")
    code, written = record([str(script), "demo", *sys.argv[1:]])
    if code != 0:
        print(written)
        print(f"the demo ended with code {code}: {PICTURE.name} is as it was", file=sys.stderr)
        return code
    PICTURE.write_text("\n".join(line.rstrip() for line in draw(last_screen(written)).splitlines()) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
