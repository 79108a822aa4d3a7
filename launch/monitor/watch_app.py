"""`pretrain watch` on a terminal: the panels of a run, refreshed in place, to scroll through.

Takes a `RunReader` -> a textual app that ends with the run, or when it is left. The directory is read in a thread of
its own: a slow disk or object store never holds up a key.
"""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from launch.monitor.reader import RunReader
from launch.monitor.watch_panels import Panel, make_panels

_STATES = {"running": "green", "completed": "green", "restarting": "yellow", "created": "yellow"}


class WatchApp(App[None]):
    """See the module.

    Args:
        every_s: seconds between two looks.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    Static.panel { height: auto; margin: 0 1; padding: 0 1; border: round $primary-muted; }
    Static.panel { border-title-color: $text-accent; }
    Static.warn { border: round $warning; }
    Static.bad { border: round $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "leave; the run goes on"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("j,down", "down", "down"),
        Binding("k,up", "up", "up"),
        Binding("space,pagedown", "page_down", "page down", show=False),
        Binding("b,pageup", "page_up", "page up", show=False),
        Binding("g,home", "home", "top"),
        Binding("G,end", "end", "end"),
        Binding("t", "theme", "light or dark"),
    ]

    def __init__(self, reader: RunReader, every_s: float) -> None:
        super().__init__()
        self._reader, self._every_s = reader, every_s
        self._looking = False
        self.shown: list[Panel] = []

    def compose(self) -> ComposeResult:
        yield VerticalScroll(id="page")
        yield Footer()

    def on_mount(self) -> None:
        self.look()
        self.set_interval(self._every_s, self.look)

    def on_resize(self) -> None:
        self.look()

    def look(self) -> None:
        """Reads the run once more, unless the look before is still under way."""
        if not self._looking:
            self._looking = True
            self.run_worker(self._read, thread=True, name="look")

    def _read(self) -> None:
        try:
            self._reader.refresh()
            panels = make_panels(self._reader, max(20, self.size.width - 8), time.time())
            self.call_from_thread(self._show, panels, self._reader.status.state, self._reader.living)
        finally:
            self._looking = False

    async def _show(self, panels: list[Panel], state: str, living: bool) -> None:
        page = self.query_one("#page", VerticalScroll)
        if [panel.title for panel in panels] != [panel.title for panel in self.shown]:
            await page.remove_children()
            await page.mount_all(Static(classes="panel") for _ in panels)
        for widget, panel in zip(page.query(Static), panels, strict=True):
            widget.border_title = panel.title or None
            widget.set_class(panel.tone == "warn", "warn")
            widget.set_class(panel.tone == "bad", "bad")
            widget.update(_painted(panel, state))
        self.shown = panels
        if not living:
            self.exit()

    def action_down(self) -> None:
        self.query_one("#page").scroll_down(animate=False)

    def action_up(self) -> None:
        self.query_one("#page").scroll_up(animate=False)

    def action_page_down(self) -> None:
        self.query_one("#page").scroll_page_down(animate=False)

    def action_page_up(self) -> None:
        self.query_one("#page").scroll_page_up(animate=False)

    def action_home(self) -> None:
        self.query_one("#page").scroll_home(animate=False)

    def action_end(self) -> None:
        self.query_one("#page").scroll_end(animate=False)

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"


def _painted(panel: Panel, state: str) -> Text:
    """The lines; the state in its colour, what went wrong in red, curves and bars in blue."""
    text = Text("\n".join(panel.lines), no_wrap=True)
    text.highlight_regex(r"[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉░]+", "blue")
    text.highlight_regex(r"(?m)^warning .*$", "yellow")
    text.highlight_regex(r"(?m)^\d\d:\d\d:\d\d (\w+ fault|failed|save of) .*$", "red")
    if not panel.title:
        text.highlight_regex(r"^\S+", "bold")
        text.highlight_regex(r"● \w+", f"bold {_STATES.get(state, 'red')}")
    return text
