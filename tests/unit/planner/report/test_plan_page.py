"""The page: self-contained, well-formed, safe against the job's own text, and its figures those of the verdicts."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from fit_results import fit_result, request

from forerun.pages.render import stylesheet
from forerun.pages.svg import Scale, log_ticks
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff, assumption_rows, job_cost_of
from forerun.planner.report.page import Point, headline, money_chart, money_legend, page, pareto
from forerun.planner.time.step_time import StepTime
from forerun.units import GIB, Bytes

EVIL = '</pre><script>alert(1)</script><img src=x onerror="alert(2)">'
VOID = {"meta", "br", "rect", "line", "circle", "polyline"}


def verdict_on(name: str, peak: float, seconds: float) -> FitResult:
    question = request(name, name="tale", data=EVIL, batch=1024, steps=5000)
    fits = peak * GIB <= question.slice.chip.usable_bytes
    step = StepTime(seconds, {"matmul": seconds * 0.75, "memory-bound rest": seconds * 0.25}) if fits else None
    parts = {"weights": Bytes(GIB), "optimizer": Bytes(2 * GIB), "gradients": Bytes((peak - 3) * GIB)}
    return fit_result(question, None, (peak, 1, 2), fits=fits, step=step, ledger=parts, program=EVIL)


SMALL = verdict_on("v6e-1", 20, 4.0)
QUICK = verdict_on("v5p-16", 10, 0.5)
LARGE = verdict_on("v5e-8", 40, 1.0)
UNPRICED = verdict_on("tpu7x-2x2x1", 30, 1.0)


def made(*verdicts: FitResult, tariff: Tariff | None = None, notes: tuple[str, ...] = ()) -> str:
    return page(verdicts[0].question.job, verdicts, tariff or Tariff(), "tale: a title", notes)


class Reader(HTMLParser):
    """Tags must nest; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_nothing_of_the_job_becomes_markup() -> None:
    reader = read(made(SMALL, QUICK, LARGE, notes=(EVIL,)))
    assert not reader.tags & {"script", "img", "iframe", "link", "object"}
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "alert(1)" in "".join(reader.text)  # it is shown, as text


def test_nothing_is_fetched() -> None:
    text = made(SMALL, QUICK, LARGE, UNPRICED)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    reader = read(text)
    assert not [value for name, value in reader.attributes if name in ("src", "href", "xlink:href", "action")]


def test_light_dark_phone() -> None:
    text = made(SMALL)
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 640px" in text
    assert 'name="viewport"' in text


def test_the_stylesheet_defines_every_colour_for_light_and_dark_and_no_other_place_names_one() -> None:
    text = made(SMALL, QUICK, LARGE)
    style, body = text.split("</style>")
    assert stylesheet() in style
    assert not re.search(r"style=|#[0-9a-f]{6}|var\(", body.split("<h2>The job</h2>")[0])
    light, dark = style.split("prefers-color-scheme: dark")
    colours = set(re.findall(r"(--[\w-]+): #", style))
    assert colours >= {f"--c{number}" for number in range(10)}
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= colours | {"--sans", "--mono"}
    assert "html:root {" in dark  # a selector that :root does not override
    for name in colours:
        assert f"{name}:" in light
        assert f"{name}:" in dark.split("/* Text */")[0]


def test_every_colour_class_of_a_chart_is_in_the_stylesheet() -> None:
    charts = "".join(re.findall(r"<svg.*?</svg>", made(SMALL, QUICK, LARGE), re.DOTALL))
    for name in {name for names in re.findall(r'class="([^"]+)"', charts) for name in names.split()} - {"name"}:
        assert re.search(rf"\.{name}\b", stylesheet()), name


def test_bars_are_to_scale() -> None:
    text = made(SMALL)
    memory = text.split("<h2>Memory</h2>")[1].split("</svg>")[0]
    widths = {
        says.split(":")[0]: float(w) for w, says in re.findall(r'width="([\d.]+)%".*?<title>(.*?)</title>', memory)
    }
    assert widths["gradients"] == pytest.approx(100 * 17 / 31.25, abs=0.01)
    assert widths["optimizer"] == pytest.approx(100 * 2 / 31.25, abs=0.01)
    time = text.split("<h2>Time of a step</h2>")[1].split("</svg>")[0]
    assert [float(w) for w in re.findall(r'width="([\d.]+)%"', time)] == [75, 25]


def test_a_bar_never_leaves_its_frame() -> None:
    memory = made(verdict_on("v5e-8", 400, 1.0)).split("<h2>Memory</h2>")[1].split("</svg>")[0]
    for x, width in re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', memory):
        assert float(x) + float(width) <= 100.01


def test_headline() -> None:
    rows = [(v, job_cost_of(v, Tariff())) for v in (SMALL, QUICK, LARGE, UNPRICED)]
    text = headline(rows, Tariff())
    assert text.startswith("Cheapest that fits: v6e-1 on spot in ")
    assert "Fastest: v5p-16, about " in text
    assert "v5e-8, 24.25 GiB" in headline([(LARGE, None), (verdict_on("v5e-4", 60, 1), None)], Tariff())
    assert "No price is known" in headline([rows[3]], Tariff())
    assert "more than $0.01" in headline(rows, Tariff(max_usd=0.01))


def test_assumptions_prices_and_the_job_are_on_the_page() -> None:
    text = "".join(read(made(SMALL)).text)
    for name, value, meaning, source in assumption_rows():
        assert all(part in text for part in (name, value, meaning, source))
    assert "SkyPilot catalog, 2026-08-21" in text
    assert "steps: 5000" in text


@pytest.mark.parametrize("verdicts", [(LARGE,), (UNPRICED,), (SMALL,), (LARGE, UNPRICED)])
def test_every_mixture_makes_a_page(verdicts: tuple[FitResult, ...]) -> None:
    read(made(*verdicts, tariff=Tariff(max_usd=1.0)))


def test_pareto_front_against_all_pairs() -> None:
    points = [Point(str(n), (n * 7) % 11 + 1, (n * 5) % 13 + 1, spot=False) for n in range(12)]

    def beaten(p: Point) -> bool:
        return any(q.hours <= p.hours and q.usd <= p.usd and (q.hours, q.usd) != (p.hours, p.usd) for q in points)

    assert {p.name for p in pareto(points)} == {p.name for p in points if not beaten(p)}


def test_scatter_stays_inside_even_with_one_point() -> None:
    for points in (
        [Point("a", 1, 1, spot=True)],
        [Point("a", 0.01, 1e5, spot=False), Point("b", 5000, 0.3, spot=True)],
    ):
        for drawing in (plot.__html__() for plot in money_chart(points).values()):
            width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0])
            for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawing):
                assert 0 < float(x) < width
                assert 0 < float(y) < height


@pytest.mark.parametrize("bounds", [(-2.0, 5.0), (0.0, 0.3), (1.1, 1.4), (-0.15, 0.15)])
def test_ticks_are_round_and_few(bounds: tuple[float, float]) -> None:
    ticks = log_ticks(Scale(*bounds, log=True), 5)
    assert 1 <= len(ticks) <= 5
    assert all(10 ** bounds[0] <= tick <= 10 ** bounds[1] for tick in ticks)


GPU = verdict_on("h100-8", 60, 0.9)


def test_a_page_of_both_platforms_names_the_limit_of_gpus_and_both_ranges() -> None:
    assert GPU.step is not None
    wide = replace(GPU, step=replace(GPU.step, low_factor=0.7, high_factor=1.4))
    text = "".join(read(made(SMALL, wide)).text)
    assert "Slices and machines" in text
    assert "memory is 90%" in text
    assert "0.75 to 1.25" in text
    assert "450 G" in text  # NVLink of an H100, B/s one way
    assert "Usable GPU memory" not in "".join(read(made(SMALL)).text)
    assert "Chips, as the step time assumes them" not in "".join(read(made(GPU)).text)


def test_the_platforms_have_markers_of_different_shape() -> None:
    points = [Point("v6e-8", 2, 30, spot=False), Point("h100-8", 1, 40, spot=False, gpu=True)]
    points += [Point("h100-8", 1.2, 20, spot=True, gpu=True)]
    for plot in money_chart(points).values():
        drawing = plot.__html__()
        assert re.findall(r"<circle[^>]*><title>(\S+)", drawing) == ["v6e-8"]
        assert re.findall(r"<rect[^>]*><title>(\S+)", drawing) == ["h100-8", "h100-8"]
        for x, y in re.findall(r'<rect class="dot[^"]*" x="([\d.]+)" y="([\d.]+)"', drawing):
            assert float(x) > 0
            assert float(y) > 0
    assert money_legend(points) == [
        ("demand round", "TPU on demand", ""),
        ("demand", "GPU on demand", ""),
        ("spot", "GPU spot, with preemptions and waiting", ""),
    ]
    assert [name for _, name, _ in money_legend(points[:1])] == ["on demand"]
