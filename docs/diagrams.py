"""Draws docs/explanation/*.svg: ``python docs/diagrams.py`` after a change here; a test compares.

The drawings bring their own background and two sets of colours, so that they can be read in light and in dark pages,
and their text is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "explanation"
WIDTH = 760

LIGHT = {
    "page": "#ffffff",
    "edge": "#d0d5dd",
    "ink": "#1d2433",
    "faint": "#667085",
    "band": "#f2f4f7",
    "r0": "#b9d7fb",
    "r1": "#fbd9a5",
    "r2": "#bfe8c5",
    "r3": "#e3c8f5",
    "accent": "#b42318",
}
DARK = {
    "page": "#161b22",
    "edge": "#3d4552",
    "ink": "#e6e9ef",
    "faint": "#9aa4b2",
    "band": "#1f2630",
    "r0": "#1f4b7d",
    "r1": "#7a5213",
    "r2": "#22603a",
    "r3": "#5a3a79",
    "accent": "#ff9b8f",
}


def colours(named: dict[str, str]) -> str:
    """The classes of one set of colours."""
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in named.items())
    lines = f".line{{stroke:{named['ink']}}}.thin{{stroke:{named['edge']}}}.mark{{stroke:{named['accent']}}}"
    return fills + lines + f".cell{{stroke:{named['page']}}}.sub{{stroke:{named['faint']}}}"


STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
    "text.small{font-size:11.5px}text.head{font-weight:600}"
    "text.code{font-family:ui-monospace,'DejaVu Sans Mono',monospace}"
    ".line,.thin,.mark,.cell,.sub{stroke-width:1.2}.none{fill:none}.mark{stroke-width:2.5}.sub{stroke-width:.5}"
    f"{colours(LIGHT)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
)


def document(title: str, height: int, parts: list[str]) -> str:
    """A drawing with its background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" class="ink"/></marker></defs>',
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="page thin"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, classes: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, classes: str, radius: float = 0) -> str:
    round_ = f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{round_} class="{classes}"/>'


def line(x1: float, y1: float, x2: float, y2: float, classes: str = "line", more: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{classes}"{more}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return line(x1, y1, x2, y2, more=' marker-end="url(#tip)"')


# -- sequence diagrams


@dataclass(frozen=True)
class Step:
    """From one column to another, or within one; the text above the arrow names the action."""

    number: str
    source: int
    target: int
    words: str


Phase = tuple[str, list[Step]]

COLUMNS = (185, 420, 655)
ROW = 42


def sequence(title: str, names: tuple[str, str, str], phases: list[Phase]) -> str:
    """Columns with names, steps from the top to the bottom, in shaded phases with a label at the left."""
    bands, steps_drawn, y = [], [], 64.0
    for number, (label, steps) in enumerate(phases):
        height = ROW * len(steps) + 8
        ground = "band" if number % 2 == 0 else "page"
        bands += [box(8, y, WIDTH - 16, height, ground, 6), text(18, y + 20, label, "faint head")]
        for row, step in enumerate(steps):
            steps_drawn += step_drawn(step, y + ROW * row + 8, ground)
        y += height
    lifelines = [line(x, 46, x, y + 6, "thin") for x in COLUMNS]
    heads = []
    for x, name in zip(COLUMNS, names, strict=True):
        heads += [box(x - 70, 14, 140, 32, "r0 thin", 6), text(x, 35, name, "ink head", "middle")]
    return document(title, round(y) + 16, [*bands, *lifelines, *heads, *steps_drawn])


def step_drawn(step: Step, y: float, ground: str) -> list[str]:
    """A box for what happens in one column, else an arrow with words above it; its number in a disc."""
    x1, x2 = COLUMNS[step.source], COLUMNS[step.target]
    width = 6.9 * len(step.words) + (32 if step.source == step.target else 16)
    middle = (x1 + x2) / 2
    ink = "accent head" if step.words.isupper() else "ink"
    words = text(middle, y + 17, step.words, ink, "middle")
    if step.source == step.target:
        return [box(middle - width / 2, y, width, 26, "page thin", 5), words, *disc(middle - width / 2, y + 13, step)]
    shaft = arrow(x1, y + 25, x2 + (6 if x2 < x1 else -6), y + 25)
    # The words stand on the colour of the phase, so that no lifeline runs through them.
    return [box(middle - width / 2, y + 4, width, 17, ground), words, shaft, *disc(x1, y + 25, step)]


def disc(x: float, y: float, step: Step) -> list[str]:
    if not step.number:
        return []
    circle = f'<circle cx="{x:g}" cy="{y:g}" r="10" class="r1 thin"/>'
    return [circle, text(x, y + 4, step.number, "ink small", "middle")]


def save_drawing() -> str:
    rank, lead, store = 0, 1, 2
    plan = [
        Step("1", rank, rank, "flatten, check the state"),
        Step("2", rank, lead, "digest, description"),
        Step("", lead, rank, "all descriptions"),
        Step("3", rank, rank, "the whole plan, its own part"),
        Step("4", rank, lead, "digests of plan and contents"),
    ]
    begin = [Step("", lead, store, "root, claim, marker"), Step("", lead, rank, "the save's id")]
    write = [
        Step("5", rank, rank, "pieces to owners"),
        Step("", rank, store, "values, chunks, node documents: every rank its own"),
        Step("6", rank, lead, "numbers, checksums"),
    ]
    commit = [
        Step("", lead, lead, "compare with the plan"),
        Step("", lead, store, "tables of checksums"),
        Step("7", lead, store, "THE ROOT DOCUMENT"),
        Step("", lead, store, "delete the replaced one"),
    ]
    phases: list[Phase] = [("plan", plan), ("begin", begin), ("write", write), ("commit", commit)]
    return sequence("A save, step by step", ("every rank", "coordinator", "store"), phases)


def load_drawing() -> str:
    rank, lead, store = 0, 1, 2
    find = [Step("1", store, lead, "the root document"), Step("", lead, rank, "to all ranks")]
    plan = [
        Step("2", rank, rank, "match keys, shapes, dtypes"),
        Step("", rank, lead, "entries without a target"),
        Step("3", rank, rank, "divide the shared reads"),
    ]
    read = [
        Step("", store, rank, "the table of checksums"),
        Step("4", store, rank, "ranges of chunks, checked, into the targets"),
        Step("", rank, rank, "parts for other ranks"),
    ]
    done = [Step("5", rank, rank, "values, then objects take state")]
    phases: list[Phase] = [("find", find), ("plan", plan), ("read", read), ("restore", done)]
    return sequence("A load, step by step", ("every rank", "coordinator", "store"), phases)


# -- chunks

SIDE = 168


def chunks_drawing() -> str:
    """Three panels: one shard a chunk; a chunk of several pieces; what a load on another mesh reads."""
    panels = [*one_each(24), *merged(274), *read_elsewhere(524)]
    return document("How DTensor shards become chunks, and how another mesh reads them", 340, panels)


def panel(x: float, head: str, below: list[str]) -> list[str]:
    lines = [text(x, 278 + 20 * number, words, "faint small") for number, words in enumerate(below)]
    return [text(x, 30, head, "ink head"), *lines]


def one_each(x: float) -> list[str]:
    parts = panel(
        x,
        "1  A shard is a chunk",
        [
            "4096 x 4096, Shard(0) on 4 ranks:",
            "four chunks; each is written by",
            "the rank that holds it",
        ],
    )
    for rank in range(4):
        y = 56 + rank * SIDE / 4
        parts += [box(x, y, SIDE, SIDE / 4, f"r{rank} cell"), text(x + 8, y + 26, f"rank {rank}", "ink small")]
        parts.append(text(x + SIDE - 8, y + 26, f"c.{rank}.0", "ink small code", "end"))
    return parts


def merged(x: float) -> list[str]:
    parts = panel(
        x,
        "2  Pieces that fit no grid",
        [
            "26 x 4096, FSDP2 x TP on 2 x 2,",
            "cut at 0, 7, 13, 20: one chunk. Its",
            "owner, rank 0, gets the other pieces",
        ],
    )
    # Tensor parallelism cuts first, then FSDP2 cuts each half: ranks 0 and 2 hold the first one.
    rows = {0: (0, 7), 2: (7, 13), 1: (13, 20), 3: (20, 26)}
    for number, (rank, (first, last)) in enumerate(rows.items()):
        y, height = 56 + first * SIDE / 26, (last - first) * SIDE / 26
        parts += [
            box(x, y, SIDE, height, f"r{rank} cell"),
            text(x + 8, y + height / 2 + 4, f"rank {rank}", "ink small"),
        ]
        if number:
            parts.append(arrow(x + 60 + 22 * number, y + height / 2, x + 60 + 22 * number, 56 + 5.2 * SIDE / 26))
    parts += [box(x, 56, SIDE, SIDE, "none line"), text(x + SIDE - 8, 78, "c.0.0", "ink small code", "end")]
    return parts


def read_elsewhere(x: float) -> list[str]:
    parts = panel(
        x,
        "3  Another mesh reads",
        [
            "Shard(1) on 4 ranks: rank 2 needs a",
            "quarter of the columns. It fetches",
            "these subchunks, and no others",
        ],
    )
    for rank in range(4):
        parts.append(box(x, 56 + rank * SIDE / 4, SIDE, SIDE / 4, f"r{rank} cell"))
    # Subchunks are an eighth as wide as the array; fewer rows of them are drawn than there are.
    for number in range(1, 8):
        parts.append(line(x + number * SIDE / 8, 56, x + number * SIDE / 8, 56 + SIDE, "sub"))
    for number in range(1, 16):
        parts.append(line(x, 56 + number * SIDE / 16, x + SIDE, 56 + number * SIDE / 16, "sub"))
    for rank in range(4):
        parts.append(text(x + SIDE + 8, 56 + rank * SIDE / 4 + 26, f"c.{rank}.0", "ink small code"))
    parts += [box(x + SIDE / 2, 54, SIDE / 4, SIDE + 4, "none mark", 2)]
    return [*parts, text(x + SIDE * 5 / 8, 248, "rank 2", "accent small", "middle")]


DRAWINGS = {"save.svg": save_drawing, "load.svg": load_drawing, "chunks.svg": chunks_drawing}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
