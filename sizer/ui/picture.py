"""Picture of one cell to paste into a chat or a ticket: the question, the verdict, and the parts of the memory."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from sizer.base.units import format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.report.estimate import Estimate
from sizer.report.peak import PeakReport
from sizer.ui.focus import PEAK_KINDS, parts
from sizer.ui.styling import COLOURS, scale_for

WIDTH, HEIGHT, EDGE = 1200, 630, 56  # pixels; the aspect ratio of link previews in chat programs
PAPER, INK, FAINT, WARNING = "#FFFFFF", "#1B1F24", "#57606A", "#B3261E"
BAR_TOP, BAR_BOTTOM = 232, 276
LINE = 29  # of the legend and of the tensors
FOOT = HEIGHT - 48
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")  # if installed; else Pillow's own font


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Texts of the picture: model and work, device, verdict and link."""

    title: str
    work: str
    verdict: str
    link: str


def alt_text(summary: Summary, estimate: Estimate, gpu: Gpu) -> str:
    """Return the alternative text of the picture."""
    process = f"{format_bytes(estimate.process_bytes)} for the process of {format_bytes(gpu.total_bytes)} on {gpu.name}"
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in _largest_first(estimate).items())
    return f"{summary.title}, {summary.work}: {process}; {summary.verdict}. {held}."


def draw_picture(summary: Summary, estimate: Estimate, gpu: Gpu, peak: PeakReport) -> bytes:
    """Return the picture as a PNG file."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    _write(draw, (EDGE, 44), summary.title, 40, bold=True)
    _write(draw, (EDGE, 98), f"{summary.work} · {gpu.name}", 24, colour=FAINT)
    room = f"{format_bytes(estimate.process_bytes)} for the process of {format_bytes(gpu.total_bytes)}"
    _write(draw, (EDGE, 142), room, 30, bold=True)
    _write(draw, (EDGE, 186), f"{summary.verdict[0].upper()}{summary.verdict[1:]}.", 22)
    _draw_bar(draw, estimate, gpu)
    top = _draw_legend(draw, estimate) + 14
    _write(draw, (EDGE, top), f"Largest at the peak of {format_bytes(peak.allocated_bytes)} allocated", 20, bold=True)
    for group in peak.tensors:
        top += LINE
        if top + LINE > FOOT:
            break
        _write(draw, (EDGE, top), format_bytes(group.bytes), 18)
        what = f"{group.count:,} × {group.tensor}, {group.category} of {group.module or 'the model itself'}"
        _write(draw, (EDGE + 120, top), what, 18)
    _write(draw, (EDGE, FOOT), summary.link, 18, colour=FAINT)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _draw_bar(draw: ImageDraw.ImageDraw, estimate: Estimate, gpu: Gpu) -> None:
    """Draw the parts of the process side by side, and a line at the device's memory."""
    whole, room = max(estimate.process_bytes, gpu.total_bytes), WIDTH - 2 * EDGE
    start = 0
    draw.rectangle((EDGE, BAR_TOP, EDGE + room, BAR_BOTTOM), fill="#EEF1F4")
    for name, size in _largest_first(estimate).items():
        left, right = (EDGE + round(room * at / whole) for at in (start, start + size))
        if right > left:
            draw.rectangle((left, BAR_TOP, right - 1, BAR_BOTTOM), fill=COLOURS[name])
        start += size
    end = EDGE + round(room * gpu.total_bytes / whole)
    draw.line((end, BAR_TOP - 10, end, BAR_BOTTOM + 10), fill=INK if estimate.verdict == "fits" else WARNING, width=3)
    text = f"{gpu.name}: {format_bytes(gpu.total_bytes)}"
    length = _font(18, False).getlength(text)
    _write(draw, (round(max(EDGE, min(end - length, WIDTH - EDGE - length))), BAR_BOTTOM + 14), text, 18, colour=FAINT)


def _draw_legend(draw: ImageDraw.ImageDraw, estimate: Estimate) -> int:
    """Draw the colour, name and bytes of each part, and return the lower end of the legend in pixels."""
    left, top = EDGE, BAR_BOTTOM + 46
    parts = _largest_first(estimate)
    scale = scale_for(parts.values())
    for name, size in parts.items():
        text = f"{name} {scale.text(size)}"
        width = 26 + round(_font(18, False).getlength(text)) + 26
        if left + width > WIDTH - EDGE:
            left, top = EDGE, top + LINE
        draw.rectangle((left, top + 3, left + 16, top + 19), fill=COLOURS[name])
        _write(draw, (left + 26, top), text, 18)
        left += width
    return top + LINE


def _largest_first(estimate: Estimate) -> dict[str, int]:
    """Return the bytes of the process by part, without parts of 0 bytes, largest first."""
    found = parts(estimate, PEAK_KINDS["process"])
    return {name: found[name] for name in sorted(found, key=lambda name: -found[name]) if found[name]}


def _write(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, *, bold: bool = False, colour: str = INK
) -> None:
    """Write one line, shortened with an ellipsis if it is wider than the picture."""
    font, room = _font(size, bold), WIDTH - EDGE - place[0]
    if font.getlength(text) > room:
        while text and font.getlength(f"{text}...") > room:
            text = text[:-1]
        text = f"{text}..."
    draw.text(place, text, font=font, fill=colour)


@functools.cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    try:
        return ImageFont.truetype(FONTS[bold], size)
    except OSError:  # not installed here
        return ImageFont.load_default(size)
