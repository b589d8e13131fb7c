"""`finback chat`: a conversation in the terminal."""

import contextlib
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finback.cli import output
from finback.cli.run import (
    ActivationsOption,
    Answer,
    ContextOption,
    DraftsOption,
    MaxTokens,
    MemoryOption,
    MinP,
    ModelOption,
    Seed,
    SpineOption,
    SystemOption,
    Temperature,
    Thinking,
    Threads,
    TopK,
    TopP,
    sampling_of,
)
from finback.config import DEFAULT_ACTIVATIONS
from finback.errors import ContextTooLong, RequestError, UsageError
from finback.hub.sessions import UNNAMED, Session, list_sessions, open_session, states_folder

if TYPE_CHECKING:
    from finback.llm import LLM

HELP = """/reset   start again
/system TEXT   start again with a system message
/undo   take back the last question and its answer
/save NAME   keep the conversation under a name, from now on after every turn
/branch NAME   go on under another name; the one so far stays as it is
/sessions   list the conversations that are kept
/help   this list
/exit   leave (also Ctrl-D)
Ctrl-C stops an answer."""


def chat(
    model: ModelOption = None,
    system: SystemOption = None,
    think: Thinking = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    threads: Threads = None,
    activations: ActivationsOption = DEFAULT_ACTIVATIONS,
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    context: ContextOption = None,
    drafts: DraftsOption = "off",
    session: Annotated[
        str | None,
        typer.Option(
            help="Keep the conversation under this name, with what was computed for it, and go on "
            "with it."
        ),
    ] = None,
) -> None:
    """Talk with a model. /help lists what can be typed besides messages."""
    sampling = sampling_of(locals())
    from finback.llm import LLM

    kept = open_session(session) if session is not None else Session("unnamed")
    with ExitStack() as stack:
        states = _states_folder(stack) if session is None else str(states_folder())
        llm = stack.enter_context(
            LLM(
                model,
                threads=threads,
                activations=activations,
                memory=memory,
                spine=spine,
                context=context,
                drafts=drafts,
                states=states,
                max_sequences=1,
            )
        )
        if llm.chat_format is None:
            raise RequestError(f"{llm.folder.name} has no chat format; use `finback run --raw`")
        output.talk(output.dim(f"{llm.description}; /help for help"))
        Conversation(llm, kept, session is not None, system, think, sampling).run()


def _states_folder(stack: ExitStack) -> str | None:
    """Make a folder for the states of a conversation without a name, gone when it ends."""
    folder = states_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(TemporaryDirectory(prefix=UNNAMED, dir=folder))
    except OSError as error:
        output.talk(
            f"finback: {folder}: nothing can be kept there ({error.strerror}); each turn computes "
            "the whole conversation"
        )
        return None


class Conversation:
    """One conversation in the terminal, kept in a session's file where it has a name."""

    def __init__(
        self,
        llm: "LLM",
        session: Session,
        is_kept: bool,
        system: str | None,
        think: bool,
        sampling: dict[str, Any],
    ) -> None:
        """Begin, or go on where the session ended."""
        self._llm, self._session, self._is_kept = llm, session, is_kept
        self._system, self._think, self._sampling = system, think, sampling
        if session.messages:
            turns = sum(message["role"] == "user" for message in session.messages)
            output.talk(output.dim(f"(session {session.name}: {turns} turns so far)"))
            if session.model != llm.folder.name:
                output.talk(output.dim(f"(they were with {session.model or 'another model'})"))
                session.ids = []
        else:
            self._start_again(system)
        session.model = llm.folder.name

    def run(self) -> None:
        """Read lines until the end."""
        messages = self._session.messages
        if messages and messages[-1]["role"] == "user":
            output.talk(output.dim("(the last question was not answered; here it comes)"))
            self._answer()
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command in ("/exit", "/quit", "/bye"):
                return
            if line.startswith("/"):
                self._command(command, rest.strip())
            elif line.strip():
                self._session.messages.append({"role": "user", "content": line})
                self._keep()  # a question survives whatever happens to its answer
                self._answer()

    def _command(self, command: str, rest: str) -> None:
        if command == "/help":
            output.talk(HELP)
        elif command in ("/reset", "/system"):
            self._start_again(rest or None if command == "/system" else self._system)
            self._keep()
            output.talk(output.dim("(new conversation)"))
        elif command == "/undo":
            self._undo()
        elif command == "/sessions":
            output.talk("\n".join(list_sessions()) or "(none)")
        elif command in ("/save", "/branch"):
            self._rename(rest)
        else:
            output.talk(f"unknown command {command}; /help lists them")

    def _start_again(self, system: str | None) -> None:
        self._system = system
        self._session.messages = [{"role": "system", "content": system}] if system else []
        self._session.ids = []

    def _undo(self) -> None:
        """Drop the last question and what followed; what was computed before it is found again."""
        messages = self._session.messages
        places = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if not places:
            output.talk("nothing to undo")
            return
        self._session.messages = messages[: places[-1]]
        self._session.ids = []
        self._keep()
        output.talk(output.dim("(the last turn is gone)"))

    def _rename(self, name: str) -> None:
        try:
            session = Session(name, self._session.model)
        except UsageError as error:
            output.talk(f"finback: {error}")
            return
        if session.path.exists() and name != self._session.name:
            output.talk(f"finback: there is a session {name} already; choose another name")
            return
        session.messages, session.ids = list(self._session.messages), list(self._session.ids)
        self._session, self._is_kept = session, True
        self._keep()
        output.talk(output.dim(f"(kept as {name})"))

    def _answer(self) -> None:
        """Stream an answer into the conversation; an error or Ctrl-C ends only this answer."""
        session = self._session
        try:
            answer = Answer(
                self._llm, session.messages, self._think, self._sampling, after=session.ids
            )
        except ContextTooLong as error:
            session.messages.pop()
            self._keep()
            output.talk(f"finback: {error}; /reset starts a new conversation")
            return
        answer.run(show=True, quiet=False)
        answer.end(quiet=False)
        said = answer.out.message
        turn = {"role": "assistant", "content": said.content}
        if said.reasoning:
            turn["reasoning_content"] = said.reasoning
        session.messages.append(turn)
        session.ids = answer.out.prompt_ids + answer.out.token_ids
        self._keep()

    def _keep(self) -> None:
        """Write the session; where that fails the conversation goes on."""
        if not self._is_kept:
            return
        try:
            self._session.save()
        except OSError as error:
            output.talk(f"finback: {self._session.path}: cannot be kept ({error.strerror})")


def _read_line() -> str | None:
    """Ask for a line; None at the end of the input. Ctrl-C gives up what was typed."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history)
    try:
        return input("> ")
    except KeyboardInterrupt:
        output.talk("\n(Ctrl-D or /exit leaves)")
        return ""
    except EOFError:
        output.talk("")
        return None
