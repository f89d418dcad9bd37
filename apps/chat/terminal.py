"""The conversation in a terminal: answers appear above an input line that stays usable."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.renderer import print_formatted_text
from prompt_toolkit.styles import Style
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from edge_spec import EdgeSpecError, PartKind
from edge_spec.apps.chat.commands import COMMANDS, CommandAnswer, Leave, Outcome, find, run_command
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.apps.chat.rendering import AnswerView, harmless, paint
from edge_spec.engine.results import cut_thought, thought_line, told_time
from edge_spec.errors import UsageError
from edge_spec.models.devices import format_bytes, resident_bytes
from edge_spec.storage.atomic import cache_directory

if TYPE_CHECKING:
    from edge_spec import Chunk

Result = TypeVar("Result")

# Drawing holds the interpreter lock that the model needs, for 10 ms each time on a slow core. Limit
# it to this share of the time.
_SHARE = 0.03
_MIN_REDRAW_S, _MAX_REDRAW_S = 0.1, 0.5
_PROMPT = "> "
_SEPARATOR = " | "
_MAX_HISTORY_BYTES = 1_000_000
_MENU_ROWS = 4
_THOUGHT_ROWS = 10  # at most, as one line replaces them at the end
_ROWS_BELOW = _MENU_ROWS + 2  # kept free for input, menu and footer
_STYLE = Style([("bottom-toolbar", "noreverse")])
_WAIT = "Goes when this has ended; Ctrl-C ends it."
_LEAVE = "Ctrl-C again, or Ctrl-D, leaves."


def footer(conversation: ChatConversation, note: str, width: int) -> str:
    """Return `note` and the running or last answer's main figures, as many as fit into `width`
    cells."""
    parts = [note] if note else []
    running = conversation.running
    result = running or conversation.last
    if result is not None:
        stats = result.stats
        per_second = stats.predicted_per_second or None
        latest = running.tokens[-1].kind if running is not None and running.tokens else None
        if latest is PartKind.REASONING:
            parts.append(f"thinking {told_time(result.reasoning_ms / 1e3)}")
        if per_second is not None:
            parts.append(f"{per_second:.0f} tokens/s")
        elif not result.tokens:
            parts.append(f"reading {conversation.reading}".rstrip())
        speedup = stats.speedup
        if running is not None:
            plain = conversation.plain_per_second
            speedup = per_second / plain if per_second is not None and plain is not None else None
        parts += [f"{speedup:.2f}x"] if speedup is not None else []
        if stats.acceptance_rate is not None:
            parts.append(f"{stats.acceptance_rate:.0%} accepted")
    parts.append(f"draft {conversation.engine.drafter}")
    memory = resident_bytes()
    parts += [format_bytes(memory)] if memory is not None else []
    parts += [conversation.engine.name] if running is None else ["Ctrl-C stops"]
    while len(parts) > 1 and cell_len(_SEPARATOR.join(parts)) > width:
        parts.pop()
    return _SEPARATOR.join(parts)


class CommandCompleter(Completer):
    """Completes commands, their choices (the last one of a comma-separated list) and paths."""

    def __init__(self, conversation: ChatConversation) -> None:
        self._conversation = conversation
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        name, space, argument = typed.partition(" ")
        command = find(name)
        if not space:
            for each in COMMANDS:
                if each.name.startswith(name):
                    yield Completion(each.name, -len(name), display_meta=each.help)
        elif command is not None:
            word = argument.rpartition(",")[2]
            for choice in command.choices(self._conversation):
                if choice.startswith(word):
                    yield Completion(choice, -len(word))
            if command.takes_path:
                yield from self._paths.get_completions(Document(argument), event)


class OwnHistory(FileHistory):
    """A history in a private file. If that cannot be written, typing goes on without it."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))


def open_history() -> History:
    """Open the history that all conversations share, or one in memory if no file can be written. A
    file above _MAX_HISTORY_BYTES is deleted first."""
    path = cache_directory() / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _MAX_HISTORY_BYTES:
            path.unlink()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return OwnHistory(path)


class Terminal:
    """Draws and reads keys in the event loop; one other thread uses the engine."""

    def __init__(self, conversation: ChatConversation) -> None:
        self._conversation = conversation
        conversation.is_terminal, conversation.report = True, self._report
        self._view: AnswerView | None = None  # of the running answer
        self._work: asyncio.Task[None] | None = None
        self._note = ""
        self._is_held = False  # the line was entered during work and will be sent after it
        self._leaving = False
        self._unfold_hint = "; /thoughts shows it"
        self._error: BaseException | None = None  # ended the session
        self._worker = ThreadPoolExecutor(1)
        self._session: PromptSession[str] = PromptSession(
            self._above_and_prompt,
            history=open_history(),
            completer=CommandCompleter(conversation),
            complete_while_typing=Condition(lambda: self._typed().startswith("/")),
            key_bindings=self._keys(),
            bottom_toolbar=self._footer,
            style=_STYLE,
            reserve_space_for_menu=_MENU_ROWS,
        )
        self._session.default_buffer.on_text_changed += lambda buffer: self._let_go()

    def talk(self) -> None:
        """Talk until /quit, Ctrl-D or Ctrl-C twice. Raises errors that are unexpected."""
        try:
            with patch_stdout():  # shows warnings above the input, too
                asyncio.run(self._talk())
        finally:
            self._conversation.stop.request()
            self._worker.shutdown()

    async def _talk(self) -> None:
        with suppress(NotImplementedError):  # on Windows Ctrl-C comes only as a key
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        while not self._leaving:
            try:
                line = await self._session.prompt_async(
                    pre_run=self._leave_if_asked, handle_sigint=False
                )
            except EOFError:
                break
            # A stray byte in a paste is a surrogate, which could not be written to a file.
            await self._take(line.encode("utf-8", "replace").decode("utf-8").strip())
        self._conversation.stop.request()
        if self._work is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # lets Ctrl-C end work that hangs
            await self._work
        if self._error is not None:
            raise self._error

    async def _take(self, text: str) -> None:
        """Run the line, or begin to. Call only while `_has_to_wait` is false."""
        self._note = ""
        if not text.startswith("/"):
            if text:
                self._begin(self._answer(CommandAnswer(text)))
            return
        command = find(text.partition(" ")[0])
        run = partial(run_command, self._conversation, text)
        if command is not None and command.takes_path:
            self._begin(self._command(run))
            return
        try:
            outcome = run()
        except (EdgeSpecError, OSError) as error:
            outcome = _complaint(error)
        if isinstance(outcome, Leave):
            self._leaving = True
        elif isinstance(outcome, CommandAnswer):
            self._begin(self._answer(outcome))
        else:
            await self._show(outcome)

    async def _command(self, run: Callable[[], Outcome]) -> None:
        outcome = await self._following(run)
        assert not isinstance(outcome, CommandAnswer | Leave)  # no slow command returns these
        await self._show(outcome)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(self._working(work))

    async def _working(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            with self._conversation.stop.ready():
                await work
        except (EdgeSpecError, OSError) as error:
            await self._show(_complaint(error))
        except Exception as error:
            self._error = error
            self._leave()
        finally:
            self._work, self._view, self._note = None, None, ""
            self._session.app.invalidate()
            if self._is_held and not self._leaving:
                self._session.default_buffer.validate_and_handle()

    async def _answer(self, message: CommandAnswer) -> None:
        room = partial(self._conversation.make_room, message.text, again=message.again)
        await self._show(await self._following(room))
        self._view = view = AnswerView(self._conversation.is_plain, self._folded)

        def on_chunk(chunk: Chunk) -> None:
            view.push(chunk.text, chunk.kind, chunk.call)

        try:
            result = await self._following(
                lambda: self._conversation.answer(message.text, on_chunk, again=message.again)
            )
        finally:
            for block in (view.take(), view.take_all()):
                await self._show(block)
        await self._show(cut_thought(result))

    async def _following(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the worker; meanwhile print finished blocks and draw the rest."""
        done = asyncio.get_running_loop().run_in_executor(self._worker, work)
        wait_s = _MIN_REDRAW_S
        while not done.done():
            begun_s = time.thread_time()  # CPU time of this thread, which only draws
            await asyncio.wait({done}, timeout=wait_s)
            if self._view is not None:
                await self._show(self._view.take())
            self._session.app.invalidate()
            drawn_s = time.thread_time() - begun_s
            wait_s = min(max(drawn_s / _SHARE, _MIN_REDRAW_S), _MAX_REDRAW_S)
        return await done

    async def _show(self, block: RenderableType | None) -> None:
        """Print a block above the input, with an empty line after it unless it is a plain answer's
        line."""
        if block is None:
            return
        is_line = self._view is not None and self._conversation.is_plain
        shown = block if is_line else Group(block, Text())
        text = to_formatted_text(ANSI(paint(shown, self._width)))
        await run_in_terminal(lambda: print_formatted_text(self._session.output, text, _STYLE))

    def _report(self, what: str, fraction: float) -> None:
        if self._conversation.stop.requested:
            raise UsageError("stopped", remedy="All is as it was.")
        self._note = f"{what} {fraction:.0%}" if fraction else what

    @property
    def _width(self) -> int:
        """One column less than there are, so that the terminal never wraps a line."""
        return self._session.output.get_size().columns - 1

    def _above_and_prompt(self) -> StyleAndTextTuples:
        view = self._view
        if view is None or not view.rest.strip() or self._session.app.is_done:
            return [("", _PROMPT)]
        rows = max(self._session.output.get_size().rows - _ROWS_BELOW, 1)
        if view.is_thinking:
            rows = min(rows, _THOUGHT_ROWS)
        return [*view.fragments(self._width, rows), ("", f"\n{_PROMPT}")]

    def _footer(self) -> str:
        return harmless(footer(self._conversation, self._note, self._width))

    def _folded(self) -> str:
        result = self._conversation.running or self._conversation.last
        hint, self._unfold_hint = self._unfold_hint, ""
        return "" if result is None else thought_line(result) + hint

    def _typed(self) -> str:
        return self._session.default_buffer.text

    def _has_to_wait(self) -> bool:
        """Return True if the typed line cannot run while the worker is busy."""
        text = self._typed().strip()
        if self._work is None or not text:
            return False
        command = find(text.partition(" ")[0])
        if command is None or not command.during_answer:
            return True
        # /draft works during an answer, but not while a model is being opened.
        return command.name == "/draft" and self._view is None

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        keys.add("c-c", filter=~is_searching)(lambda event: self._interrupt())
        waits = Condition(self._has_to_wait) & ~is_searching
        keys.add("enter", filter=waits)(lambda event: self._hold())
        return keys

    def _hold(self) -> None:
        self._is_held, self._note = True, _WAIT

    def _let_go(self) -> None:
        """Keep a held line from being sent once it is edited."""
        if self._is_held:
            self._is_held, self._note = False, ""

    def _interrupt(self) -> None:
        """Handle Ctrl-C: stop the answer, else clear the line, else leave at the second time."""
        if self._work is not None:
            self._conversation.stop.request()
            self._note = "Stopping."
        elif self._typed():
            self._session.default_buffer.reset()
        elif self._note == _LEAVE:
            self._leave()
        else:
            self._note = _LEAVE
        self._session.app.invalidate()

    def _leave(self) -> None:
        self._leaving = True
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        app = self._session.app
        if self._leaving and app.is_running and not app.is_done:
            app.exit(exception=EOFError())


def _complaint(error: Exception) -> str:
    return f"edge-spec: {error}"
