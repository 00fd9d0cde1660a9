"""Test that the figures of docs/lab/performance.md are those of its files, tables and constants."""

from __future__ import annotations

import json
import re

import pandas as pd

from benchmarks import attention_report, loss_memory, train_step
from benchmarks.attention import parser
from benchmarks.host import launch_time
from megatron.engine.gpus import gpu_named
from tests.helpers.paths import ROOT
from tests.model.published_sizes import PYTHIA
from tests.pages.figures.held import LAB, constant, preparation_memory, rows, says, yml
from tests.ptx.cost_model import BANDWIDTH

PAGE, FOLDER = LAB / "performance.md", ROOT / "benchmarks" / "results"


def row(heading: str, start: str, table: str = "|") -> dict[str, str]:
    """Return the row of a table of the page whose first cell begins with a text."""
    (found,) = (x for x in rows(PAGE, heading, table) if next(iter(x.values())).startswith(start))
    return found


def stands(heading: str, start: str) -> str:
    return row(heading, start)["stands"]


def words(path: str) -> list[list[str]]:
    """Return the cells of all tables of a report, as text."""
    lines = (FOLDER / path).read_text().splitlines()
    return [[x.strip() for x in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def limits(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_attention_on_a_cpu():
    report = json.loads((FOLDER / "attention_cpu" / "attention.json").read_text())["timings"]
    blocked = [each for each in report if each["variant"] == "blocked"]
    batches = ", ".join(str(each["batch"]) for each in blocked)
    time = [f"{each['forward_backward_ratio']:.2f}" for each in blocked]
    memory = [f"{each['peak_ratio']:.2f}" for each in blocked]
    found = row("On a CPU", "attention, forward and backward")
    assert f"batch {batches} (" in found["what"] and found["stands"] == ", ".join(time)
    *first, second = limits(found["goal"])
    assert all(float(x) <= goal for x, goal in zip(time, first, strict=True))
    one, two, three = (
        f"{float(x) - second:.2f} at {each['batch']}" for x, each in zip(time, blocked, strict=True)
    )
    assert f"missed at every batch size, by {one}, {two} and {three}" in found["evidence"]
    memories = row("On a CPU", "its peak memory")
    assert memories["stands"] == ", ".join(memory)
    assert max(map(float, memory)) <= limits(memories["goal"])[0]


def test_attention_with_documents():
    report = json.loads((FOLDER / "attention_cpu_documents/attention.json").read_text())
    timings = {each["variant"]: each for each in report["timings"]}
    whole, *parts = (x for name, x in timings.items() if name.startswith("blocked"))
    (documents,), (window,) = (limits(each["variant"]) for each in parts)
    ratios = [f"{each[key] / whole[key]:.2f}" for key in ("forward_backward_ms", "forward_ms")
              for each in parts]  # fmt: skip
    length = report["setting"]["length"]
    what = f"attention with {documents:g} documents, or a window of {window:g}, in {length:,}"
    said = "{} and {}; the forward pass {} and {}".format(*ratios)
    assert stands("On a CPU", what) == said


def goals_on(device: str) -> list[float]:
    return [least for *_, least in train_step.GOALS[device]]


def test_products_generation_and_exports():
    times = pd.read_csv(FOLDER / "linear_time.csv").query("passes == 'forward and backward'").ratio
    says("lab/performance", f"take {times.min():.2f} to {times.max():.2f} of the time; the")
    shape = r"(\d+ layers)(?: of|,) width (\d+)"
    speed = {name: ratio for name, *_, ratio in words("generation_speed.md")}
    found = row("On a CPU", "generated tokens per second")
    prompt = re.findall(r"64 tokens after (\d+)", (FOLDER / "generation_speed.md").read_text())[0]
    assert (
        found["stands"] == f"{speed['rotary']} with rotary, {speed['kerple_log']} with kerple_log"
    )
    assert f"{prompt} tokens before" in found["what"]
    assert f"would be {speed['the products alone, by torch']} times as fast" in found["evidence"]
    for report, start in (("generation_speed", "generated"), ("hub_forward", "export in")):
        (layers, width), *_ = re.findall(shape, (FOLDER / f"{report}.md").read_text())
        assert f"{layers} of width {width}" in row("On a CPU", start)["what"]
    export = {name: ratio for name, *_, ratio in words("hub_forward.md")[2:]}
    *passes, token = (ratio for name, ratio in export.items() if "memory" not in name)
    lengths = [re.findall("[\\d,]+ tokens", x)[0][:-7] for x in export if x.startswith("forward")]
    found = row("On a CPU", "export in transformers")
    assert found["stands"] == f"{', '.join(passes)}; {token}"
    assert f"backward at {lengths[0]}, {lengths[1]} and {lengths[2]} tokens" in found["what"]
    assert all(
        float(x) <= most for x, most in zip([*passes, token], limits(found["goal"]), strict=True)
    )


def test_memory_and_saving():
    *_, last = (x for x in rows(PAGE, "Memory of the loss") if x["precision"] == "fp32")
    tokens, whole, pieces = (last[name] for name in list(last)[1:])
    found = row("On a CPU", "peak memory of a step")
    assert found["stands"] == f"{tokens} tokens in fp32: {pieces} instead of {whole.split()[0]}"
    vocabulary = loss_memory.VOCABULARY
    assert f"vocabulary of {vocabulary // 1000}k" in found["what"]
    code = (ROOT / "benchmarks" / "loss_memory.py").read_text()
    layers, width = (re.findall(rf'"--{x}", type=int, default=(\d+)', code)[0]
                     for x in ("layers", "width"))  # fmt: skip
    assert layers == "2"
    says("lab/performance", f"two layers of width {width} with a vocabulary of {vocabulary:,} (")
    saved = rows(PAGE, "Saving beside training")[0]
    waits = row("On a CPU", "training waits for a save")
    first, later = saved["async_save`: first save"], saved["later saves"]
    assert waits["stands"] == f"{later} s; the first save {first} s"
    once = {x["what"]: x["value"] for x in rows(LAB / "measurements.md", "Measured once")}
    (long,) = (what for what in once if what.startswith("evaluation of the quickstart's model at"))
    assert stands("On a CPU", long) == once[long]


def test_data():
    small, large = (pd.read_csv(FOLDER / f"data_prep{x}.csv") for x in ("", "_640"))
    at = [x.set_index(["path", "workers"]) for x in (small, large)]
    auto, giga = ("prepare_data.py, auto", 2), ("prepare_data.py, gigatoken", 2)
    ratio = [x.ratio_to_per_document_1 for x in at]
    (memory, text), (more, long) = preparation_memory()
    one, two = (at[0].ratio_at_equal_workers["prepare_data.py, auto", n] for n in (1, 2))
    neox = at[0].seconds["HFTokenizer, per document", 1] / at[0].seconds[auto]
    wanted = {
        f"preparation, {text} of text": f"{ratio[0][auto]:.1f}; {ratio[1][auto]:.1f} on {long}",
        "the same at equal": f"{one:.1f} (one), {two:.1f} (two)",
        "the same / one gpt-neox": f"{neox:.1f}",
        "with `--backend": f"{ratio[0][giga]:.1f} on {text}, {ratio[1][giga]:.0f} on {long}",
        "peak memory": f"{memory} for {text} of text, {more} for {long}",
    }
    assert {start: stands("Data", start) for start in wanted} == wanted
    done = pd.read_csv(FOLDER / "samples.csv").set_index(["task", "code"])
    index, reading = (done.loc[x, "this project"] for x in ("sample index", "reading"))
    faster = done.ms["reading", "published"] / reading.ms
    built = f"{index.ms_divided_by_published:.2f}, the same bits, "
    built += f"{index.extra_bytes_per_document:.1f} bytes"
    assert stands("Data", "time to build a sample index") == built
    rate = f"{reading.samples_per_s / 1000:.0f}k samples a second"
    assert stands("Data", "rate of reading samples") == f"{faster:.1f} ({rate})"


def test_kernels_that_are_counted():
    name, found = "GPU kernels, counted", pd.read_csv(ROOT / "tools" / "compiled_kernels.csv")
    hopper = found[(found.target == "sm_90") & (found.dtype == "bf16")]
    short = found[(found.dtype != "fp32") & (found.head_size <= 128)]
    blackwell = short.target.isin(["sm_100", "sm_120"])
    serial = f"{(hopper.serialised > 0).sum()} of {len(hopper)}"
    spilled = [(x.spilled > 0).sum() for x in (short[~blackwell], short[blackwell])]
    sizes = " and ".join(map(str, sorted(set(short[blackwell].head_size))))
    assert stands(name, "variants for Hopper") == serial
    assert stands(name, "variants that spill") == (
        f"{spilled[0]} of {(~blackwell).sum():,}; on Blackwell {spilled[1]} of {blackwell.sum()}"
        f" (bf16, {sizes})"
    )
    log = hopper[(hopper.kernel == "kerple_log") & (hopper.head_size == 64)]
    log = log[(log.dropout == 0) & (log.group == 1)].special_functions_per_score
    special = row(name, "special functions for each score")
    forward, query, key = (
        round(a - b, 2) for a, b in zip(log, limits(special["goal"]), strict=True)
    )
    assert special["stands"] == ", ".join(f"{x:.2f}" for x in log) and key <= 0
    said = f"misses it by {forward:.2f}, the query pass by {query:.2f}"
    assert said in special["evidence"]
    (version,) = set(found.triton)
    spilled = f"of {(found.target == 'sm_100').sum()} variants spilled"
    says("lab/performance", f"compile_kernels.py`, for Triton {version}.", spilled)
    time = row(name, "predicted time")
    (without,) = re.findall(r"^([\d.]+) without shared memory", time["stands"])
    goal = float(without) - limits(time["goal"])[0]
    assert f"which misses the goal by {goal:.2f}; " in time["stands"]
    lost = row(name, "rows of dq off")
    goal, (low, high) = limits(lost["goal"].split(":")[1]), limits(lost["stands"])[:2]
    assert f"{low - goal[0]:g} to {high - goal[1]:g} rows too many" in lost["evidence"]
    allowed = re.findall(r'3e-5 if case.dtype == "fp32" else (\S+)', code("tests/ptx/verify.py"))
    assert stands(name, "error of theta's gradient").startswith(f"≤ {allowed[0]}, held by")


def code(file: str) -> str:
    return (ROOT / file).read_text()


def test_the_time_of_a_launch():
    found = pd.read_csv(FOLDER / "launch_time.csv").set_index(["call", "passes"])
    goals = launch_time.GOALS
    cells = row("GPU kernels, counted", "time of the host for a launch")
    plain, cached = (
        {call: [f"{found[column][call, each] + 0.01:.0f}" for each in goals]
         for call in ("launch", "attention with autograd")}
        for column in ("Triton's launch, us", "cached, us")
    )  # fmt: skip
    (a, b), (c, d) = plain.values()
    (e, f), (g, h) = cached.values()
    said = f"{a} and {b}; with `cached_launches` {e} and {f}; with autograd around it {c} and {d}"
    assert cells["stands"] == f"{said}, cached {g} and {h}"
    limit = [*goals.values()]
    assert cells["goal"] == "; ".join(f"≤ {x} µs" for x in limit)
    missed = f"the goals are missed by {int(g) - limit[0]} and {int(h) - limit[1]} µs"
    assert cells["evidence"].endswith(missed)
    assert row("On a GPU", "host time of a call", "| what")["goal"] == cells["goal"]


def test_the_predictions_agree_with_each_other():
    says(
        "lab/performance",
        f"greedy schedule of the programs' tiles on {gpu_named('H100').multiprocessors} multi",
        f"Shared memory delivers {BANDWIDTH} bytes in a clock",
    )
    table = rows(PAGE, "Predictions and outcomes", "| change")
    first = re.findall(r"→ ([\d., ]+)", table[0]["counted"])[0].split(", ")
    limit = rows(PAGE, "Predictions and outcomes", "| pass")
    assert limit[0]["limit"] == f"special functions, {first[0]}"
    issue = next(x["counted"] for x in table if x["change"].startswith("products of the bias"))
    assert limit[0]["next"].startswith(f"issue, {issue.partition(',')[0]}, and")
    query = next(x["counted"] for x in table if x["change"].startswith("threads exchange"))
    assert limit[1]["limit"] == f"issue, {query}"


def test_the_goals_of_attention_on_a_gpu():
    goals, given = attention_report.GOALS, parser().get_default
    shape = f"{given('heads')} heads of {min(given('head_sizes'))}"
    says("lab/performance", f"bf16, {shape}, {given('tokens') // 1024}k tokens, medians")
    for found in rows(PAGE, "On a GPU"):
        length, *cells = found.values()
        shown = [limits(cell) for cell in cells]
        for each in length.replace(",", "").split(" and "):
            forward, both, published, table, heads = goals[int(each)]
            assert shown == [[forward], [both], [published], [table, heads]]


def test_the_goals_of_a_step_on_a_gpu():
    published, plain, compiled = goals_on("cuda")
    assert row("On a GPU", "training step, 162M", "| what")["goal"] == f"≥ {published:g}x"
    goal = row("On a GPU", "the same / the same loop without bias", "| what")["goal"]
    assert goal == f"≥ {plain:g}; ≥ {compiled:.1f}"
    more = attention_report.MEGABYTE_MORE
    assert (
        f"FlashAttention's ≤ {more:.0f} MB" in row("On a GPU", "the table above", "| what")["what"]
    )
    long = constant("tests/gpu/test_gpu_memory.py", "LONG")
    assert row("On a GPU", f"gradients bit for bit, memory at {long:,} tokens", "| what")
    size = PYTHIA["small", 128][0]
    length, batch = (yml("paper/train.yml")[x] for x in ("seq_length", "train_batch_size"))
    assert row("On a GPU", f"training step, {size / 1e6:.0f}M, batch {batch} x {length}", "| what")
    says(
        "lab/performance",
        f"a micro-batch of {batch} x {length + 1} tokens has {batch * (length + 1) * 8 // 1000} kB",
    )
