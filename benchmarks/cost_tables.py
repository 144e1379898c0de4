"""Tables of RESULTS.md that quote one file each: what a report, lying devices and noise cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.result_files import stored
from protocol.query import NoiseMode

# What the short table of noise shows of its file.
NOISE_BUCKETS = (128, 4096)

# Any: a result as its file has it.
Found = Mapping[str, Any]


def report_part() -> Iterator[str]:
    """Bytes, sealing and ingest of a checked report beside an unchecked one."""
    yield from _table(
        "buckets",
        "bytes",
        "over unchecked",
        "sealing over unchecked, null and full",
        "ingest over unchecked, by helper",
        "ingest over the bare HPKE open",
        "Prio3Histogram, two parties",
    )
    for found in stored("report")["reports"]:
        over = found["over_unchecked"]
        ingest = ", ".join(f"{ratio:.2f}" for ratio in over["ingest"])
        yield (
            f"| {found['buckets']:,} | {found['bytes_total']:,} | {over['bytes']:.2f} "
            f"| {over['seal']:.2f}, {over['seal_full']:.2f} | {ingest} "
            f"| {found['open_over_bare']:.2f} | {found['prio3_histogram_bytes']:,} bytes |"
        )


def validity_part() -> Iterator[str]:
    """Batches with more and more lying devices."""
    yield from _table(
        "lying devices", "counted", "left out as invalid, by helper", "sums", "seconds", "bytes between helpers"
    )
    for found in stored("validity")["validity"]:
        left_out = ", ".join(f"{count:,}" for count in found["counted_invalid"])
        sums = "exact" if found["sums_exact"] else "WRONG"
        yield (
            f"| {found['invalid']:,} | {found['counted']:,} | {left_out} | {sums} "
            f"| {found['seconds']:.0f} | {found['peer_bytes']:,} |"
        )


def noise_part() -> Iterator[str]:
    """All modes side by side."""
    yield from _table(
        "mode",
        "buckets",
        "in a fresh process",
        "in one that ran some",
        "bytes it sends",
        "rounds",
        "standard deviation",
    )
    for found in stored("noise")["noise"]:
        if found["buckets"] in NOISE_BUCKETS:
            yield (
                f"| `{found['mode']}` | {found['buckets']:,} | {1000 * found['cpu_seconds']:.1f} ms "
                f"| {1000 * found['again_cpu_seconds']:.1f} ms | {found['bytes']:,} | {found['rounds']} "
                f"| {found['standard_deviation']:.0f} |"
            )


def noise_sweep_part() -> Iterator[str]:
    """All modes over buckets and scales: processor time, then what `joint` sends."""
    cells = {(found["scale"], found["buckets"], found["mode"]): found for found in stored("noise-wide")["noise"]}
    scales, buckets = (sorted({cell[place] for cell in cells}) for place in (0, 1))
    headings = [f"{count:,} buckets" for count in buckets]
    yield from _table("scale b", *headings)
    for scale in scales:
        of_scale = (" · ".join(_time(cells.get((scale, count, mode.value))) for mode in NoiseMode) for count in buckets)
        yield f"| {_scale(scale)} | {' | '.join(of_scale)} |"
    yield from _table("scale b", "rounds of `joint`", *(f"bytes at {heading}" for heading in headings))
    for scale in scales:
        yield _joint_line(scale, [cells.get((scale, count, NoiseMode.JOINT.value)) for count in buckets])


def _joint_line(scale: int, found: Sequence[Found | None]) -> str:
    sent = " | ".join("–" if each is None else f"{each['bytes']:,}" for each in found)
    rounds = {each["rounds"] for each in found if each is not None}
    return f"| {_scale(scale)} | {', '.join(map(str, sorted(rounds)))} | {sent} |"


def _time(found: Found | None) -> str:
    return "–" if found is None else f"{1000 * found['cpu_seconds']:,.0f}"


def _scale(scale: int) -> str:
    exponent = scale.bit_length() - 1
    return f"2^{exponent}" if scale == 2**exponent and exponent > 9 else f"{scale:,}"


def _table(*columns: str) -> Iterator[str]:
    """The lines above the first row, with an empty one before them."""
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield "|" + len(columns) * "---|"
