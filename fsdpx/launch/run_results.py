"""Prints and saves the results of a training run: a summary line, and a run folder with the model, the loss curve and
the report."""

from __future__ import annotations

from fsdpx.core.base.messages import format_count, wrap_for_terminal
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import install_hint
from fsdpx.ext.observe.folder import RunFolder
from fsdpx.ext.observe.html_page import write_report_page
from fsdpx.ext.observe.report import ReportSummary

__all__ = ["format_summary_line", "save_and_print_results"]


def format_summary_line(history: FitHistory, unit: str) -> str:
    """Return one line with the number of steps, the rate and the last losses of a training run. The rate is in `unit`
    per second, and excludes the time for validation and saving."""
    parts = []
    if history.losses:
        rate = history.samples_seen / history.seconds
        steps = format_count(len(history.losses), "step")
        parts = [steps, f"{rate:,.0f} {unit}/s", f"training loss {history.losses[-1]:.4f}"]
    if history.validation:
        parts.append(f"validation loss {history.validation[-1][1]:.4f}")
    return ", ".join(parts)


def save_and_print_results(
    trainer: Trainer, history: FitHistory, folder: RunFolder, summary: ReportSummary, resume: str
) -> None:
    """Save the trained model, the loss curve and the report to the run folder, and print the paths on rank 0.
    Collective.

    `resume` is printed as the command that continues the run."""
    drawn = trainer.call_runner.run_on_rank0(
        f"draw {folder.curve_path}", lambda: folder.draw_curve() or folder.curve_path.exists()
    )
    if history.losses or not trainer.call_runner.run_on_rank0(
        f"look for {folder.model_folder}", folder.model_folder.exists
    ):
        trainer.save(folder.model_folder)
    if trainer.call_runner.rank == 0:
        folder.write_report(str(summary), summary.to_json())
        write_report_page(folder)
        curve = "curve.png" if drawn else f"no curve.png ({install_hint('plot')})"
        text = (
            f"run folder: {folder.path}\n    config.json, metrics.csv, metrics.jsonl, {curve}, report.html, "
            "report.txt, log.txt, checkpoints/, model/\n"
            f"weights: {folder.model_folder / 'model.safetensors'}\nto continue: {resume}"
        )
        print(wrap_for_terminal(text), flush=True)
