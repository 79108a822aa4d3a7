"""`pretrain watch` on a terminal: a run's facts on four pages, refreshed in place, to scroll through.

Takes a `RunReader` -> a textual app that ends with the run, or when it is left: how the run stands, what happened, its
config, its logs. The directory is read in a thread of its own: a slow disk or object store never holds up a key.
"""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from launch.monitor.facts import run_facts
from launch.monitor.ledger import Kind
from launch.monitor.reader import RunReader
from launch.monitor.watch_history import LETTERS, TIMELINE, config_panels, history_panels, log_panels
from launch.monitor.watch_panels import Panel, run_panels
from pretrain.errors import PretrainError

PAGES = ("run", "history", "config", "logs")
_STATES = {"running": "green", "completed": "green", "restarting": "yellow", "created": "yellow"}
_KINDS = {
    Kind.TRAINING: "green", Kind.VALIDATION: "blue", Kind.CHECKPOINT: "magenta", Kind.FIRST_START: "bright_black",
    Kind.RESTART: "yellow", Kind.REWORK: "red", Kind.ENDING: "bright_black", Kind.IDLE: "bright_black",
}  # fmt: skip
_MOST_EVENTS = 400


class WatchApp(App[None]):
    """See the module.

    Args:
        every_s: seconds between two looks.

    Attributes:
        shown: the panels of each page.
    """

    TITLE = "pretrain watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    Static.panel { height: auto; margin: 0 1; padding: 0 1; border: round $primary-muted; }
    Static.panel { border-title-color: $text-accent; }
    Static.warn { border: round $warning; }
    Static.bad { border: round $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "leave; the run goes on"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        *(Binding(str(at), f"page('{name}')", show=False) for at, name in enumerate(PAGES, start=1)),
        Binding("j,down", "down", "down"),
        Binding("k,up", "up", "up"),
        Binding("space,pagedown", "page_down", "page down", show=False),
        Binding("b,pageup", "page_up", "page up", show=False),
        Binding("g,home", "home", "top"),
        Binding("G,end", "end", "end"),
        Binding("n", "log(1)", "next log"),
        Binding("p", "log(-1)", "log before"),
        Binding("t", "theme", "light or dark"),
    ]

    def __init__(self, reader: RunReader, every_s: float) -> None:
        super().__init__()
        self._reader, self._every_s = reader, every_s
        self._looking = self._again = False
        self._logs: list[str] = []
        self._chosen: str | None = None  # by somebody; else the newest of rank 0
        self._log: str | None = None
        self.shown: dict[str, list[Panel]] = {}

    def compose(self) -> ComposeResult:
        with TabbedContent(initial="run"):
            for at, name in enumerate(PAGES, start=1):
                with TabPane(f"{at} {name}", id=name):
                    yield VerticalScroll(id=f"{name}-page", can_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.look()
        self.set_interval(self._every_s, self.look)

    def on_resize(self, event: events.Resize) -> None:
        self.look()

    def look(self) -> None:
        """Reads the run once more; once again after the look that is still under way."""
        if self._looking:
            self._again = True
        else:
            self._looking = True
            self.run_worker(self._read, thread=True, name="look")

    def _read(self) -> None:
        try:
            self._read_once()
            while self._again:
                self._again = False
                self._read_once()
        except PretrainError as error:  # storage out of reach: what was read stays on the screen
            self.call_from_thread(self.notify, str(error), severity="warning")
        finally:
            self._looking = False

    def _read_once(self) -> None:
        self._reader.refresh()
        facts, width, now = run_facts(self._reader), max(20, self.size.width - 8), time.time()
        self._logs = facts["logs"]
        self._log, logs = log_panels(self._reader, facts, self._chosen, width)
        pages = {
            "run": run_panels(self._reader, facts, width, now),
            "history": history_panels(facts, width, now, most_rows=_MOST_EVENTS),
            "config": config_panels(self._reader, facts, width, now),
            "logs": logs,
        }
        self.call_from_thread(self._show, pages, self._reader.status.state, self._reader.living)

    async def _show(self, pages: dict[str, list[Panel]], state: str, living: bool) -> None:
        for name, panels in pages.items():
            page, before = self.query_one(f"#{name}-page", VerticalScroll), self.shown.get(name, [])
            if panels == before:
                continue
            at_end = not before or page.max_scroll_y - page.scroll_y < 2
            if len(panels) != len(before):
                await page.remove_children()
                await page.mount_all(Static(classes="panel") for _ in panels)
            for widget, panel in zip(page.query(Static), panels, strict=True):
                widget.border_title = panel.title or None
                widget.set_class(panel.tone == "warn", "warn")
                widget.set_class(panel.tone == "bad", "bad")
                widget.update(_painted(panel, state))
            if name == "logs" and at_end:  # follows, unless somebody reads further up
                page.scroll_end(animate=False)
        self.shown = pages
        if not living:
            self.exit()

    def action_page(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def action_log(self, step: int) -> None:
        """Another log, and its page."""
        self.action_page("logs")
        now = self._chosen or self._log
        if now in self._logs:
            self._chosen = self._logs[(self._logs.index(now) + step) % len(self._logs)]
        self.look()

    def _page(self) -> VerticalScroll:
        return self.query_one(f"#{self.query_one(TabbedContent).active}-page", VerticalScroll)

    def action_down(self) -> None:
        self._page().scroll_down(animate=False)

    def action_up(self) -> None:
        self._page().scroll_up(animate=False)

    def action_page_down(self) -> None:
        self._page().scroll_page_down(animate=False)

    def action_page_up(self) -> None:
        self._page().scroll_page_up(animate=False)

    def action_home(self) -> None:
        self._page().scroll_home(animate=False)

    def action_end(self) -> None:
        self._page().scroll_end(animate=False)

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"


def _painted(panel: Panel, state: str) -> Text:
    """The lines; the state in its colour, what went wrong in red, curves and bars in blue."""
    if panel.title == TIMELINE:
        return _painted_timeline(panel.lines)
    text = Text("\n".join(panel.lines), no_wrap=True)
    text.highlight_regex(r"[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉░]+", "blue")
    text.highlight_regex(r"(?m)^warning .*$", "yellow")
    text.highlight_regex(r"(?m)^(\w+ \d+ )?\d\d:\d\d:\d\d (\w+ fault|failed|save of) .*(\n {11}.*)*$", "red")
    if not panel.title:
        text.highlight_regex(r"^\S+", "bold")
        text.highlight_regex(r"● \w+", f"bold {_STATES.get(state, 'red')}")
    return text


def _painted_timeline(lines: list[str]) -> Text:
    """Faults in red, what the time went to in the colours of its kinds, in the bar and in the legend."""
    marks, bar, saved, ends, legend, words = (Text(f"{line}\n", no_wrap=True) for line in lines)
    for line in (marks, words):
        line.highlight_regex("✗", "bold red")
        line.highlight_regex("↶", "bold yellow")
    for kind, colour in _KINDS.items():
        bar.highlight_regex(f"[{LETTERS[kind]}]+", colour)
        legend.highlight_regex(rf"{LETTERS[kind]}(?= {kind})", colour)
    for line in (saved, words):
        line.highlight_regex("▴", "magenta")
    words.rstrip()
    return Text.assemble(marks, bar, saved, ends, legend, words, no_wrap=True)
