# SPDX-License-Identifier: Apache-2.0
"""Figures out of Google Benchmark's JSON; bench/support/figure.h is the other end."""
import dataclasses
import re

_SUFFIXES = re.compile(
    r"(/(iterations|repeats|min_time|min_warmup_time|threads):[^/]*|/(manual|real|process)_time)+$")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass
class Figure:
    """One measured value beside its limit. `limit` and `target` are None where there is none."""
    program: str
    name: str
    value: float
    unit: str
    better: str = "higher"
    limit: float | None = None
    limit_name: str = ""
    target: float | None = None
    repetitions: int = 1
    value_min: float | None = None
    value_max: float | None = None

    @property
    def ratio(self):
        """How close the value comes to its limit: 1 is there, more is better. None without one."""
        return _ratio(self.value, self.limit, self.better)

    @property
    def meets_target(self):
        """Whether the target is reached; None when nothing is promised."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    def as_dict(self):
        fields = dataclasses.asdict(self)
        fields["ratio"] = None if self.ratio is None else round(self.ratio, 4)
        fields["meets_target"] = self.meets_target
        return fields


def from_google_benchmark(program, report):
    """(figures, problems) of one program's report; a problem is a line of text."""
    runs, problems = {}, []
    for run in report.get("benchmarks", []):
        if run.get("run_type", "iteration") != "iteration":
            continue
        name = clean_name(run.get("run_name", run["name"]))
        if run.get("error_occurred") or run.get("skipped"):
            reason = run.get("error_message") or run.get("skip_message") or "no reason given"
            problem = f"{program} {name}: {reason}"
            if problem not in problems:
                problems.append(problem)
            continue
        runs.setdefault(name, []).append(_from_run(program, name, run))
    return [_middle(same) for same in runs.values()], problems


def clean_name(name):
    """A benchmark's name without what Google Benchmark adds to it."""
    name = _SUFFIXES.sub("", name)
    return name[3:] if name.startswith("BM_") else name


def _from_run(program, name, run):
    if "value" not in run:
        return _without_limit(program, name, run)
    label = dict(part.split("=", 1) for part in run.get("label", "").split(";") if "=" in part)
    return Figure(program=program, name=name, value=run["value"], unit=label.get("unit", ""),
                  better=label.get("better", "higher"), limit=run.get("limit"),
                  limit_name=label.get("limit", ""), target=run.get("target"))


def _without_limit(program, name, run):
    """A benchmark that states no figure: its rate if it has one, else its time an iteration."""
    for counter, scale, unit in (("bytes_per_second", 1e-9, "GB/s"), ("items_per_second", 1, "/s")):
        if counter in run:
            return Figure(program, name, run[counter] * scale, unit)
    microseconds = run["real_time"] * _SECONDS[run.get("time_unit", "ns")] * 1e6
    return Figure(program, name, microseconds, "us", better="lower")


def _middle(same):
    """The repetition with the median ratio (value, where no limit is known), and the spread.

    One repetition's value and limit belong together: they were measured in turns.
    """
    ordered = sorted(same, key=lambda figure: figure.ratio or figure.value)
    middle = ordered[(len(ordered) - 1) // 2]
    middle.repetitions = len(same)
    middle.value_min = min(figure.value for figure in same)
    middle.value_max = max(figure.value for figure in same)
    return middle


def _ratio(value, limit, better):
    if not limit or not value:
        return None
    return value / limit if better == "higher" else limit / value
