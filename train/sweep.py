"""The table at the end of a sweep: one line a job."""

from dataclasses import dataclass
from typing import Any

COLUMNS = {
    "final loss": ("final_loss", "{:.4f}"),
    "eval loss": ("eval_loss", "{:.4f}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "TFLOP/s a rank": ("tflops_per_rank", "{:.3g}"),
    "MFU": ("mfu", "{:.1%}"),
    "peak GiB a rank": ("peak_memory_gib", "{:.2f}"),
}


@dataclass
class Outcome:
    """A job's overrides and its summary; None: it failed, or was asked to stop."""

    overrides: list[str]
    summary: dict[str, Any] | None
    stopped: bool = False

    @property
    def failed(self) -> bool:
        return self.summary is None and not self.stopped


def table(outcomes: list[Outcome]) -> str:
    """Markdown; overrides that all jobs share stand above it, not in every line."""
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    lines = [f"Common to all: {' '.join(sorted(common)) or 'the defaults'}", ""]
    lines += ["| " + " | ".join(["overrides", *COLUMNS]) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for outcome in outcomes:
        overrides = " ".join(o for o in outcome.overrides if o not in common)
        lines.append("| " + " | ".join([overrides, *_cells(outcome)]) + " |")
    return "\n".join(lines)


def _cells(outcome: Outcome) -> list[str]:
    if outcome.summary is None:
        return ["failed" if outcome.failed else "stopped"] + ["-"] * (len(COLUMNS) - 1)
    values = [(outcome.summary.get(key), form) for key, form in COLUMNS.values()]
    return ["-" if value is None else form.format(value) for value, form in values]
