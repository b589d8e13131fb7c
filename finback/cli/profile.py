"""Where the seconds and bytes of a run went, in words and as JSON."""

from typing import TYPE_CHECKING, Any

from finback.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from finback.llm import LLM, Completion


def profile_json(llm: "LLM", out: "Completion") -> dict[str, Any]:
    """Give the profile of prompt and answer, under the names of `finback bench stream`."""
    from finback.storage.memory import peak_bytes

    s, ceiling = out.stats, out.stats.disk_gbps
    return {
        "ceiling_gbps": ceiling,
        "huge_page_share": None if llm.disk is None else llm.disk.huge_page_share,
        "prompt": s.prompt.as_json(s.prompt_tokens, ceiling),
        "decode": s.decode.as_json(max(0, s.tokens - 1), ceiling),
        "peak_memory_bytes": peak_bytes(),
        "budget_bytes": llm.plan.budget,
        "plan": dict(llm.plan.parts),
        "streamed_groups": len(llm.plan.streamed),
        "expert_slots": llm.plan.num_slots,
    }


def profile_text(llm: "LLM", out: "Completion") -> str:
    """Put the profile into a few lines."""
    from finback.storage.memory import peak_bytes

    s, ceiling = out.stats, out.stats.disk_gbps
    rows = []
    for name, part in (("prompt", s.prompt), ("decode", s.decode)):
        if part.wall_s <= 0:
            continue
        spent = {**part.compute, "waiting": part.wait_s, "other": part.other_s}
        shares = ", ".join(
            f"{phase} {seconds / part.wall_s:.0%}"
            for phase, seconds in sorted(spent.items(), key=lambda pair: -pair[1])
            if seconds >= 0.005 * part.wall_s
        )
        rows.append(f"{name:<9} {human_seconds(part.wall_s)}: {shares}")
    d, counts = s.decode, s.whole.counts
    disk = "not measured" if ceiling is None else f"{ceiling:.2f} GB/s at most"
    of = f", {d.gbps / ceiling:.0%} of it" if ceiling and d.bytes_read else ""
    by_role = ", ".join(
        f"{human_bytes(counts[name])} of {what}"
        for name, what in (("bytes_read_expert", "experts"), ("bytes_read_spine", "layers"))
        if counts.get(name)
    )
    rows.append(f"{'disk':<9} {disk}; {d.gbps:.2f} GB/s while decoding{of}")
    rows.append(
        f"{'read':<9} {by_role or 'nothing'}; {human_bytes(s.whole.mean_request)} a request, "
        f"{human_seconds(s.whole.read_s)} with reads under way"
    )
    guesses = ""
    if counts.get("guesses"):
        used, wasted = counts.get("guesses_used", 0), counts.get("guesses_wasted", 0)
        guesses = f"; of {counts['guesses']} guesses {used} were used and {wasted} wasted"
    rows.append(f"{'experts':<9} {s.whole.hit_rate:.0%} were in memory{guesses}")
    if s.whole.counts.get("drafts"):
        stood, steps = s.whole.counts.get("drafts_stood", 0), s.whole.counts["steps"]
        rows.append(
            f"{'drafts':<9} {stood} of {s.whole.counts['drafts']} stood; "
            f"{s.tokens / max(1, d.counts.get('steps', steps)):.2f} tokens a pass while decoding"
        )
    steps, used = s.whole.counts.get("steps", 0), s.whole.counts.get("experts_used", 0)
    if steps and used:
        layers = max(1, len(llm.engine.model.shape.routed_layers))
        rows.append(
            f"{'passes':<9} {steps}, of {s.whole.counts.get('rows', 0) / steps:.1f} rows and "
            f"{used / steps / layers:.1f} different experts a layer"
        )
    parts = ((name, size) for name, size in llm.plan.parts.items() if size)
    plan = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts)
    held, budget = human_bytes(peak_bytes()), human_bytes(llm.plan.budget)
    rows.append(f"{'memory':<9} {held} at most of {budget}: {plan}")
    if llm.plan.streamed:
        rows.append(
            f"{'streamed':<9} {len(llm.plan.streamed)} layers are read again for each token"
        )
    return "\n".join(rows)
