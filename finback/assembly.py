"""From a folder and options to an engine that can run: the one place where all parts meet."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from finback.checkpoint.files import read_json_if_there
from finback.checkpoint.fingerprint import fingerprint
from finback.checkpoint.hf import read_sampling, read_stop_ids
from finback.checkpoint.index import Checkpoint, open_checkpoint
from finback.config import DRAFT_NAMES, EngineConfig, SamplingParams
from finback.engine.drafts import DraftController, ModelDrafter
from finback.engine.engine import Engine
from finback.engine.scheduler import StepLimits
from finback.engine.snapshots import SnapshotStore
from finback.errors import CheckpointError, UsageError
from finback.hub.local import find_model
from finback.hub.sessions import states_folder
from finback.kernels.backends import best_backend
from finback.kernels.ops import Ops
from finback.models.base import BLOCK_ROWS, Model
from finback.models.convert import with_spine
from finback.models.loading import Loaded, MemoryPlan, load_model, read_needs
from finback.models.state import StateSpill
from finback.planner.memory import plan_memory
from finback.spans import Spans
from finback.storage.arena import reserve
from finback.storage.probe import LEAST_MEMORY, MEMORY_BYTES, DiskRate, measure_ceiling
from finback.storage.spill import SpillFile
from finback.text.chat import ChatFormat, load_chat
from finback.text.tokenizer import Tokenizer, load_tokenizer, read_tokenizer_config, token_text
from finback.units import parse_bytes


@dataclass(slots=True)
class Assembly:
    """A model with everything around it. Close it when done."""

    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    sampling: SamplingParams  # the model's own defaults
    ops: Ops
    plan: MemoryPlan
    disk: DiskRate | None  # None where a step reads nothing, or it could not be measured
    loaded: Loaded
    engine: Engine
    _stack: ExitStack

    def close(self) -> None:
        """Close every file, that of spilled states too."""
        self._stack.close()


def assemble(folder: Path, config: EngineConfig, spans: Spans) -> Assembly:
    """Check a folder and load what stays in memory. Where that fails nothing stays open.

    Raises:
        CheckpointError: The folder is missing, damaged or of an unsupported kind.
        CapacityError: It does not fit into the memory.
        UsageError: An option does not fit the model.
    """
    with ExitStack() as stack:
        checkpoint = open_checkpoint(folder)
        generation = read_json_if_there(folder / "generation_config.json")
        sampling = read_sampling(generation)
        tokenizer = load_tokenizer(folder)
        chat_format = load_chat(folder, tokenizer)
        ops = best_backend(config.threads, config.activations)
        with spans.span("load"):
            needs = read_needs(with_spine(checkpoint, config.spine))
            small = _load_drafter(tokenizer, config, stack)
            reserved = 0 if small is None else sum(small.plan.parts.values())
            plan = plan_memory(needs, config, ops, reserved=reserved)
            disk = _measure_disk(checkpoint, plan) if plan.reads_from_disk else None
            loaded = load_model(needs, plan, ops, spans, config)
        stack.callback(loaded.reader.close)
        limits = StepLimits(
            max_rows=plan.max_rows,
            max_sequences=plan.max_sequences,
            max_resident=plan.max_resident,
            prompt_rows=config.prompt_rows,
            context=plan.context,
        )
        ends = _stop_ids(folder, loaded.model, tokenizer, checkpoint.config, generation)
        engine = Engine(loaded.model, limits, spans, ends)
        if plan.max_resident < plan.max_sequences:
            engine.spill = _open_spill(config, plan, loaded, engine)
            stack.callback(engine.spill.close)
        if config.max_spill_writes is not None:
            engine.max_spill_bytes = parse_bytes(config.max_spill_writes)
        if config.drafts != "off":
            engine.drafts = make_controller(loaded.model)
        if small is not None:
            model, memory = small.engine.model, small.engine.memory
            engine.make_drafter = lambda s: ModelDrafter(model, s.sampling, s.seed, memory)
        if config.states is not None:
            engine.snapshots = _open_states(needs.checkpoint, config, ops, loaded)
            engine.keep_every = config.keep_every or engine.keep_every
            engine.keep_every_s = config.keep_every_s or engine.keep_every_s
        return Assembly(
            tokenizer, chat_format, sampling, ops, plan, disk, loaded, engine, stack.pop_all()
        )


def make_controller(model: Model) -> DraftController:
    """Make what says whether drafts pay for a model, with nothing learnt so far."""
    return DraftController(model.shape.top_k / max(1, model.shape.num_experts))


def _load_drafter(tokenizer: Tokenizer, config: EngineConfig, stack: ExitStack) -> Assembly | None:
    """Load the small model that drafts, if there is one, and compare the vocabularies."""
    if config.drafts in DRAFT_NAMES:
        return None
    options = EngineConfig(
        memory=config.memory,
        context=config.context,
        max_sequences=config.max_sequences,
        max_rows=BLOCK_ROWS,
        threads=config.threads,
        activations=config.activations,
        guesses=False,
        spill=False,
    )
    folder = find_model(config.drafts)
    small = assemble(folder, options, Spans())
    stack.callback(small.close)
    one, other = tokenizer, small.tokenizer
    is_same = (
        one.num_tokens == other.num_tokens
        and one.specials == other.specials
        and all(one.token_bytes(n) == other.token_bytes(n) for n in range(one.num_tokens))
    )
    if not is_same:
        raise UsageError(
            f"{folder}: has another vocabulary than the model, so it cannot draft for it"
        )
    return small


def _open_spill(
    config: EngineConfig, plan: MemoryPlan, loaded: Loaded, engine: Engine
) -> StateSpill:
    """Make the file for states that do not fit into memory."""
    folder = states_folder() if config.states is None else Path(config.states).expanduser()
    try:
        file = SpillFile(folder, loaded.reader, engine.spans, engine.memory)
    except OSError as error:
        raise UsageError(
            f"{folder}: states cannot be spilled there ({error.strerror}); choose another "
            "folder with FINBACK_STATES, or run fewer sequences together"
        ) from error
    return StateSpill(file, loaded.model.shape.num_layers, plan.context)


def _open_states(
    checkpoint: Checkpoint, config: EngineConfig, ops: Ops, loaded: Loaded
) -> SnapshotStore:
    """Open the folder of states for exactly this model and way of computing."""
    folder = Path(str(config.states)).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is no folder; states are kept in one")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    quota = parse_bytes(config.states_quota, shutil.disk_usage(there).total)
    made_by = f"{ops.name} {getattr(ops, 'isa', '')} {ops.activations} {config.spine}"
    return SnapshotStore(folder, f"{fingerprint(checkpoint)} {made_by}", loaded.reader, quota)


def _stop_ids(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer,
    config: Mapping[str, object],
    generation: Mapping[str, object],
) -> list[int]:
    """Collect the ids that end an answer, and check the vocabulary against the model."""
    size = model.shape.vocab_size
    if tokenizer.num_tokens > size:
        raise CheckpointError(
            f"{folder}: the tokenizer gives ids up to {tokenizer.num_tokens - 1}, "
            f"the model embeds {size}; the files belong to different models"
        )
    text = config.get("text_config")
    configs = {"generation_config.json": generation, "config.json": config}
    if isinstance(text, dict):
        configs["config.json: text_config"] = text
    ends = read_stop_ids(configs, size)
    named = token_text(read_tokenizer_config(folder).get("eos_token"))
    if named is not None and named in tokenizer.specials:
        ends.append(tokenizer.specials[named])
    return ends


def _measure_disk(checkpoint: Checkpoint, plan: MemoryPlan) -> DiskRate | None:
    """Measure the disk, within the plan's memory; None if there is too little of either."""
    size = min(MEMORY_BYTES, plan.budget - plan.parts["interpreter"])
    if size < LEAST_MEMORY:
        return None
    paths = [checkpoint.folder / name for name in checkpoint.files]
    return measure_ceiling(paths, memory=reserve(size))
