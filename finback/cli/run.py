"""`finback run`: one prompt, one answer."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finback.cli import output
from finback.cli.kept import keep_running, kept_options, parse_every, resume_run
from finback.cli.many import answer_all, read_prompts, requests_of
from finback.cli.profile import profile_json, profile_text
from finback.cli.texts import logprob_json, read_lines
from finback.config import (
    DEFAULT_ACTIVATIONS,
    DEFAULT_POLICY,
    MAX_LOGPROBS,
    MAX_SEED,
    POLICY_NAMES,
    SEQUENCES,
    Activations,
    SamplingParams,
)
from finback.errors import UsageError
from finback.hub.runs import RunRecord
from finback.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from finback.llm import LLM, Completion


def _help(name: str) -> str:
    """Take an option's help from the dataclass it fills."""
    fields = {f.name: f for f in dataclasses.fields(SamplingParams)}
    return str(fields[name].metadata["help"])


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model folder or a name from `finback list`.",
        show_default="storyteller",
    ),
]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="A system message.")]
MaxTokens = Annotated[int | None, typer.Option(help=_help("max_tokens"), min=1)]
Temperature = Annotated[float | None, typer.Option(help=_help("temperature"), min=0.0, max=100.0)]
TopP = Annotated[float | None, typer.Option(help=_help("top_p"), max=1.0)]
TopK = Annotated[int | None, typer.Option(help=_help("top_k"), min=0)]
MinP = Annotated[float | None, typer.Option(help=_help("min_p"), min=0.0, max=1.0)]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help=_help("repetition_penalty"), min=0.01, max=100.0)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help=_help("frequency_penalty"), min=-100.0, max=100.0)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help=_help("presence_penalty"), min=-100.0, max=100.0)
]
Seed = Annotated[int | None, typer.Option(help=_help("seed"), min=0, max=MAX_SEED)]
Threads = Annotated[
    int | None, typer.Option(help="Computing threads; all cores if left out.", min=1)
]
ActivationsOption = Annotated[
    Activations,
    typer.Option(
        "--activations",
        help="How rows are rounded before products with quantised weights.",
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        help="Everything finback may hold: 4GiB, 50% of the machine, or auto for what is free."
    ),
]
SpineOption = Annotated[
    str,
    typer.Option(
        help="What every token uses: published, or a form made by `finback convert` (int8, int4, "
        "or its folder), which is not exact."
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a sequence, prompt and answer.",
        min=1,
        show_default="16384, or what the model holds",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        help=f"Which expert to give up for another: {', '.join(POLICY_NAMES)}; pinned keeps what "
        "--heat has most of."
    ),
]
DraftsOption = Annotated[
    str,
    typer.Option(
        help="Guess tokens and verify several in one pass, while it pays: off, lookup (what "
        "followed the last tokens when they occurred before), or a small model of the same "
        "vocabulary. The text stays the same."
    ),
]
Thinking = Annotated[
    bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")
]


def run(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="The prompt; what is piped in joins it."),
    ] = None,
    model: ModelOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask the model, or let it continue a text.",
            show_default="chat if it can",
        ),
    ] = None,
    system: SystemOption = None,
    think: Thinking = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    seed: Seed = None,
    threads: Threads = None,
    activations: ActivationsOption = DEFAULT_ACTIVATIONS,
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    context: ContextOption = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where the seconds and bytes went.")
    ] = False,
    heat: Annotated[
        Path | None,
        typer.Option(help="Keep across runs, in this file, which experts are used much."),
    ] = None,
    policy: PolicyOption = DEFAULT_POLICY,
    drafts: DraftsOption = "off",
    trace: Annotated[
        Path | None,
        typer.Option(help="Record which experts were used, for `finback replay`."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; repeatable.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            help="Answer several prompts together, one a line of this file (- for standard input)."
        ),
    ] = None,
    spill: Annotated[
        bool,
        typer.Option(
            "--spill/--no-spill",
            help="With --prompt-file: write states that memory has no room for to disk in every "
            "pass, or answer fewer prompts together.",
        ),
    ] = True,
    max_spill_writes: Annotated[
        str | None, typer.Option(help="Begin no further such answers after so much: 200GB.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="Let the answer be JSON that this schema allows.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Let the answer match a regular expression.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Let the answer be one of these texts; repeatable.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Let the answer follow this Lark grammar.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: rate the answer's tokens, with so many likeliest others.",
            min=0,
            max=MAX_LOGPROBS,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Keep the run every so often, to go on with it after whatever happens: 256 "
            "(tokens), 10min or 30s.",
            metavar="EVERY",
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with a run that --checkpoint has kept.", metavar="ID")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with all figures.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone.")] = False,
) -> None:
    """Answer one prompt. Text goes to stdout, everything else to stderr.

    Without --max-tokens a continued text (--raw) ends after 256 tokens, an answer where the
    model ends it.
    """
    if resume is not None:
        if prompt or prompt_file is not None:
            raise UsageError("--resume has its own prompt; give neither another nor --prompt-file")
        resume_run(resume, checkpoint, memory, threads, as_json, quiet)
        return
    every = None if checkpoint is None else parse_every(checkpoint)
    if every is not None and prompt_file is not None:
        raise UsageError("--checkpoint keeps one run; leave out --prompt-file")
    if prompt_file is None:
        prompts = [_prompt(prompt or [])]
    elif prompt:
        raise UsageError("give a prompt or --prompt-file, not both")
    else:
        prompts = read_prompts(prompt_file)
    limits = {"json_schema": _text_of(json_schema), "grammar": _text_of(grammar)}
    sampling = sampling_of(locals() | limits)
    for option, path in (("--trace", trace), ("--heat", heat)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{option} {path}: is no file that can be written; choose another")
    if chat is False and system is not None:
        raise UsageError("--system belongs to a conversation; leave out --raw")
    from finback.llm import LLM

    with LLM(
        model,
        threads=threads,
        activations=activations,
        memory=memory,
        spine=spine,
        policy=policy,
        drafts=drafts,
        spill=spill,
        max_spill_writes=max_spill_writes,
        **kept_options(every),
        heat=None if heat is None else str(heat),
        context=context,
        max_sequences=min(len(prompts), SEQUENCES),
    ) as llm:
        if not quiet and not as_json:
            output.talk(output.dim(llm.description))
        as_chat = chat if chat is not None else llm.chat_format is not None
        recorder = llm.record_routes() if trace is not None else None
        if every is not None:
            options = {"spine": spine, "activations": activations, "context": context}
            record = RunRecord(
                _whole_name(model), prompts[0], system, as_chat, think, sampling, options
            )
            is_whole = keep_running(llm, record, every, as_json, quiet)
        elif prompt_file is None:
            is_whole = _answer_one(
                llm, prompts[0], system, as_chat, think, sampling, as_json, profile, quiet
            )
        else:
            requests = requests_of(prompts, system, as_chat, think, sampling)
            is_whole = answer_all(
                llm, prompts, requests, lambda out: report(llm, out, as_chat), as_json, quiet
            )
        if trace is not None and recorder is not None:
            recorder.trace().save(trace)
        if not is_whole:
            raise typer.Exit(130)


def _answer_one(
    llm: "LLM",
    text: str,
    system: str | None,
    as_chat: bool,
    think: bool,
    sampling: dict[str, Any],
    as_json: bool,
    profile: bool,
    quiet: bool,
) -> bool:
    """Answer one prompt as it comes; false if Ctrl-C ended it."""
    answer = Answer(llm, messages_of(text, system) if as_chat else text, think, sampling)
    if not as_chat and not as_json and not quiet:
        output.echo(text)
    is_whole = answer.run(show=not as_json, quiet=quiet)
    if as_json:
        value = report(llm, answer.out, as_chat)
        if profile:
            value["profile"] = profile_json(llm, answer.out)
        output.json_data(value)
    else:
        answer.end(quiet)
        if profile:
            output.talk(profile_text(llm, answer.out))
    return is_whole


def _whole_name(model: str | None) -> str | None:
    """Name a model so that it is found from anywhere."""
    is_folder = model is not None and Path(model).expanduser().exists()
    return str(Path(str(model)).expanduser().absolute()) if is_folder else model


def _text_of(path: Path | None) -> str | None:
    return None if path is None else "\n".join(read_lines(str(path)))


def messages_of(text: str, system: str | None) -> list[dict[str, Any]]:
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": text}]


class Answer:
    """One answer on its way to the terminal: content to stdout, reasoning and figures to stderr."""

    def __init__(
        self,
        llm: "LLM",
        prompt: Any,
        think: bool,
        sampling: dict[str, Any],
        after: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Ask for the answer; `prompt` is a text to continue, or messages after computed ids.

        `written` are tokens of the answer that are there already.
        """
        from finback.llm import ChatCompletion
        from finback.text.chat import ChatOptions

        self.out = ChatCompletion()
        self._mid_line = False  # whether reasoning stands on an unfinished line of stderr
        if isinstance(prompt, str):
            text = llm.stream(prompt, self.out, written, **sampling)
            self._pieces: Iterator[tuple[str, str]] = (("content", piece) for piece in text)
        else:
            options = ChatOptions(thinking=think)
            chat = llm.stream_chat(prompt, options, self.out, after, written, **sampling)
            self._pieces = self._collected(chat)

    def run(self, show: bool, quiet: bool, on_piece: Callable[[], None] = lambda: None) -> bool:
        """Take the answer, printing it as it comes; False if Ctrl-C ended it."""
        try:
            for kind, text in self._pieces:
                on_piece()
                if kind == "content":
                    self.out.text += text
                if show:
                    self._show(kind, text, quiet)
        except KeyboardInterrupt:
            self.out.finish_reason = self.out.finish_reason or "abort"
        return self.out.finish_reason != "abort"

    def _show(self, kind: str, text: str, quiet: bool) -> None:
        if kind == "content":
            self._end_line()
            output.data(text, end="")
        elif text and not quiet:
            output.talk(output.dim(output.printable(text)), end="")
            self._mid_line = True

    def end(self, quiet: bool) -> None:
        """Print what follows an answer."""
        self._end_line()
        output.data("")
        if not self.out.text and self.out.finish_reason == "length":
            output.talk(
                "finback: the tokens were used up before the answer began; "
                "raise --max-tokens, or leave out the thinking with --no-think"
            )
        if not quiet:
            output.talk(output.dim(figures(self.out)))

    def _end_line(self) -> None:
        if self._mid_line:
            output.talk("")
            self._mid_line = False

    def _collected(self, pieces: Iterator[Any]) -> Iterator[tuple[str, str]]:
        from finback.text.parse import collect

        for piece in pieces:
            collect(self.out.message, piece)
            yield piece.kind, piece.text


def sampling_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the sampling options that were given out of a command's arguments, and check them.

    Raises:
        RequestError: One cannot be used; nothing was loaded for it.
    """
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    given = {n: v for n, v in arguments.items() if n in names and v is not None}
    SamplingParams(**given)
    return given


def figures(out: "Completion") -> str:
    """Put a run's figures on one line."""
    s = out.stats
    end = {"length": " (cut at the limit)", "abort": " (stopped)"}.get(out.finish_reason or "", "")
    rate = f", {s.tokens_per_s:.3g} tokens/s" if s.tokens_per_s else ""
    if rate and s.disk_gbps and s.decode.gbps:
        rate += f" at {s.decode.gbps:.2f} of the disk's {s.disk_gbps:.2f} GB/s"
    kept = f" ({s.restored_tokens} kept from before)" if s.restored_tokens else ""
    return (
        f"{s.prompt_tokens} tokens in{kept}, {s.tokens} out{end}{rate}, "
        f"{human_bytes(s.bytes_per_token)} read per token, {human_seconds(s.compute_s)} computing, "
        f"{human_seconds(s.read_s)} reading, seed {out.seed}"
    )


def report(llm: "LLM", out: Any, as_chat: bool) -> dict[str, Any]:
    """Gather everything about a run for `--json`."""
    s = out.stats
    value: dict[str, Any] = {
        "model": llm.folder.name,
        "activations": llm.activations,
        "text": out.text,
        "finish_reason": out.finish_reason,
        "token_ids": out.token_ids,
        "seed": out.seed,
        "stats": {
            name: getattr(s, name)
            for name in (
                "prompt_tokens",
                "tokens",
                "prompt_s",
                "decode_s",
                "compute_s",
                "wait_s",
                "read_s",
                "bytes_read",
                "tokens_per_s",
                "bytes_per_token",
                "disk_gbps",
            )
        },
    }
    if as_chat:
        value["message"] = dataclasses.asdict(out.message)
    if out.logprobs:
        value["logprobs"] = [logprob_json(llm, token) for token in out.logprobs]
    if out.error is not None:
        value["error"] = str(out.error)
    return value


def _prompt(words: list[str]) -> str:
    """Join the arguments, and standard input where it is piped; `-` alone means standard input."""
    text = "" if words == ["-"] else " ".join(words)
    piped = ""
    if not sys.stdin.isatty():
        piped = sys.stdin.read()
        piped = piped.removesuffix("\n")
    if not text and not piped:
        raise UsageError("no prompt: give one as an argument or through a pipe")
    return "\n\n".join(part for part in (text, piped) if part)
