"""Test that the figures of the lab's pages are those of the code, the configs and the logs."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import yaml

from megatron.config import load_config
from megatron.evaluation.suite.measure import Sample
from tests.distributed.matrix import STEPS, all_cells, alternating
from tests.helpers.paths import ROOT
from tests.mutation.log import EQUIVALENT, GONE, KILLED, SURVIVED, read
from tests.pages.test_documented_numbers import one_line, rows
from tools.experiments.grid import read_grid

LAB, RESULTS = ROOT / "docs" / "lab", ROOT / "docs" / "results"
SUITE = "megatron/evaluation/suite/"


def says(page: str, *sentences: str) -> None:
    """Assert that a page of the lab has all these sentences."""
    text = one_line(LAB / page)
    missing = [each for each in sentences if each not in text]
    assert not missing, (page, missing)


def constant(file: str, name: str) -> Any:
    """Return the value of a constant of a Python file, without an import of the file."""
    for node in ast.parse((ROOT / file).read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            found = [getattr(each, "id", "") for each in names]
            if name in found:
                values = node.value.elts if isinstance(target, ast.Tuple) else [node.value]
                return ast.literal_eval(values[found.index(name)])
    raise AssertionError(f"{file} has no constant {name}")


def grid(name: str) -> Any:
    return read_grid(ROOT / "configs" / "paper" / f"{name}.yml")


def and_list(values: Any) -> str:
    """Return "1, 2 and 3"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def test_the_measures_of_the_suite():
    """The table of measures has the constants of the code."""
    tail = Sample.tail.fget(SimpleNamespace(longest=4096))
    by_position = pd.read_csv(ROOT / "docs/quickstart/suite/by_position.csv")
    first, second, third, fourth = by_position.context[:4]
    depths, orders = (
        constant(SUITE + file, name)
        for file, name in (("recall.py", "DEPTHS"), ("pointer.py", "ORDERS"))
    )
    gain, low = (constant(SUITE + "key_tokens.py", name) for name in ("KEY_GAIN", "KEY_LOSS"))
    longest, queries = (constant(SUITE + "heads.py", name) for name in ("LONGEST", "QUERIES"))
    says(
        "suite.md",
        f"predicted from {first}, {second}-{third - 1}, {third}-{fourth - 1}, ... tokens",
        f"the loss of the last {tail} tokens if the model",
        f"how much the loss of the last {tail} tokens changes",
        f"At least {constant(SUITE + 'context.py', 'SCORED'):,} tokens are scored",
        f"where the last {and_list(orders).replace(' and', ' or')} tokens stood",
        f"falls by more than {gain:g} nats through attention beyond W, and is then below {low:g}",
        f"each block of {constant(SUITE + 'recall.py', 'BLOCK')} tokens of the first copy",
        f"at a depth of {and_list(f'{x:g}' for x in depths).replace(' and', ' or')} of a text",
        f"in texts from {constant(SUITE + 'ruler.py', 'SHORTEST')} tokens on",
        f"more than {constant(SUITE + 'heads.py', 'COLLAPSED'):.0%} of their attention on",
        f"read at up to {longest:,} tokens, its last {queries} queries count",
    )


def test_the_planted_models():
    found = pd.read_csv(RESULTS / "suite_planted.csv")
    wrong = found[found.right != "yes"].set_index(["seed", "model", "question"]).sort_index()
    windows = [name.split()[-1] for name in found.model.unique() if name.startswith("window")]
    good = sorted(set(found.seed) - set(wrong.index.get_level_values("seed")))
    (first, count), (last, _) = Counter(wrong.index.get_level_values("seed")).items()
    short, long = (wrong.loc[first, model].iloc[0] for model in ("window of 16", "pointer"))
    assert short.name == "context" and short.answer == "1" and long.name == "words"
    again = wrong.loc[last]
    assert [*again.index] == [("pointer", "words")] and count == 2
    assert again.answer.iloc[0] == long.answer
    places = found[(found.question == "copy") & (found.model == "pointer")].expected
    config = load_config([ROOT / "configs" / "quickstart.yml"])
    length, longest = config.model.seq_length, max(config.evaluation.eval_lengths)
    says(
        "suite.md",
        f"with a window of {windows[0]}, of {windows[1]} and without limit",
        f"On seeds {good[0]} and {good[1]}, which were used",
        f"the first fresh seed ({first}) had shown two such answers: no use of context beyond the"
        f" last token for the window of {windows[0]}, and common words up to {long.answer} instead"
        f" of {long.expected} tokens for the pointer. Seed {last} was drawn",
        f"the places that are found out of {places.iloc[0].count('@')}, and",
        f"trained at {length} tokens and read at {longest:,}, begins",
        f"Text beyond {length} tokens offers",
        f"(documents of at least {longest:,} tokens)",
    )


def test_the_paper_and_its_grids():
    table3, xl = grid("table3"), grid("xl")
    about, model = table3.about, xl.cells[0].config()
    sequences = yaml.safe_load((ROOT / "configs/paper/eval.yml").read_text())["eval_iters"]
    lengths, seeds = about.lengths, {1: "one", 5: "five"}[len(about.seeds)]
    assert len(about.axes["embedding"]) == 6 and len(about.axes["corpus"]) == 3
    count = table3.cells[0].config().evaluation.eval_tokens // lengths[-1]
    assert count == sequences
    size = constant("tests/engine/test_published_sizes.py", "PYTHIA")["small", 128][0]
    page = (LAB / "paper.md").read_text()
    says(
        "paper.md",
        f"| 2 | the {size / 1e6:.0f}M model and its training |",
        f"| 9, left | {size / 1e6:.0f}M models, trained at 1,024 |",
        f"six embeddings, three corpora, {lengths[0]} to {lengths[-1]:,} tokens |",
        f"The paper measures {count} sequences of each length",
        f"on the same text: {count} sequences of {lengths[-1]:,} tokens.",
        f"then read the first {count} sequences of the split",
        f"at {about.alpha:.0%} over {seeds} seeds.",
        f"has a batch of {model.batch.train_batch_size} for the 1.3B model",
    )
    shown = re.findall(r"at ([\d,]+) tokens.*?--length (\d+) --window (\d+)", page)
    assert [length.replace(",", "") for length, *_ in shown] == [at for _, at, _ in shown]
    assert len({window for *_, window in shown}) == 1
    says("paper.md", f"a window of {shown[0][2]} |", f"only the last {shown[0][2]} tokens.")


def test_the_figures_of_the_paper_for_small_models():
    positions = pd.read_csv(RESULTS / "recipe_screen" / "positions.csv")
    found = pd.read_csv(RESULTS / "recipe_screen" / "effective.csv")
    script = "docs/lab/paper_figures.py"
    log = found[(found.model == "kerple_log") & (found.distance < constant(script, "FARTHEST"))]
    short, middle, long = log.distance[log.heads > 0]
    steps = int(grid("recipe_screen").variables["steps"])
    config = grid("recipe_screen").cells[0].config()
    length = positions.first_position.max() + constant(script, "BIN")
    says(
        "paper.md",
        f"bias is below {constant(script, 'STRONG'):g} (Section A.5).",
        f"trained for {steps:,} steps at {config.model.seq_length} tokens",
        f"{positions.sequences.max()} sequences of {length:,} tokens;",
        f"an effective length of {long} tokens, the others of {short} and {middle}.",
    )
    mean = positions[positions.first_position >= 128].groupby("model").perplexity.mean()
    assert mean["kerple_log"] < mean["kerple_log, windowed at 128"] < mean["alibi"]


def test_the_mutants():
    page, heading = LAB / "mutants.md", r"Do the tests notice faults\?"
    table, every = rows(page, heading, "| seed"), []
    for row in table:
        comments, found = read(ROOT / "tests" / "mutation" / f"seed{row['seed']}.log")
        first = re.findall(r"# (\d+) of [\d,]+ sites, (\d+) killed", "\n".join(comments))[0]
        now = Counter(each.verdict for each in found)
        counted = len(found) - now[EQUIVALENT]
        numbers = [*first, *(now[x] for x in (KILLED, GONE, EQUIVALENT, SURVIVED))]
        dead = f"{(counted - now[SURVIVED]) / counted:.1%}"
        assert [*row.values()][1:] == [*map(str, numbers), dead]
        every += found
    alive = [each for each in every if each.verdict == SURVIVED]
    changes = {Path(each.place).stem: f"{each.before} {each.after}" for each in alive}
    steps = re.findall(r"\d+\*\*9", changes.pop("deepspeed_engine"))
    old, new = (each.replace("**", "^") for each in steps)
    (lowest,) = re.findall(r"\d{4}1\b", changes.pop("recall"))
    assert [*changes] == ["compiled"] and changes["compiled"].endswith("self._seen = -1")
    first, second = table
    killed = second["killed at first"]
    says(
        "mutants.md",
        f"when seed {first['seed']} first ran.",
        f"then seed {second['seed']} was drawn. So its {killed} of {second['mutants']} show what",
        f"less than {constant('tests/mutation/server.py', 'SLOW'):g} seconds each took part",
        f"after {new} instead of {old} steps, the smallest pass key is {int(lowest):,}, and",
    )
    places = re.findall(r"^\| `\w+/.*?\.py`(?: \((\d)\))? \|", page.read_text(), re.M)
    equivalent = [each for each in every if each.verdict == EQUIVALENT]
    assert sum(int(count or 1) for count in places) == len(equivalent)


def test_the_log_of_the_matrix_of_layouts():
    lines = (ROOT / "tests" / "distributed" / "matrix.log").read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    cells = [line for line in lines if line not in comments]
    others = [line for line in cells if re.search("-(cross|layers)-", line)]
    ranks = [math.prod(int(n) for n in re.findall(r"-?[tcpd]p(\d+)", x.split("-z")[0]))
             for x in cells]  # fmt: skip
    of_others = {n for n, line in zip(ranks, cells, strict=True) if line in others}
    every = [cell for cell in all_cells(8) if cell != cell.truth]
    minutes = re.findall(r"0 failed; (\d) minutes for the last part", "\n".join(comments))
    largest = {"fp32": 0.0, "bf16": 0.0}
    for line in cells:
        kind, error = re.findall(r"-(fp32|bf16)-.* (\S+) \(at most", line)[0]
        largest[kind] = max(largest[kind], float(error))
    allowed = constant("tests/distributed/matrix.py", "TOLERANCE")
    assert all(line.endswith(" ok") for line in cells) and STEPS == 10 and of_others == {1, 2}
    pairs = [f"{x['fp32']:.{n}e} in fp32 and {x['bf16']:.{n}e} in bf16"
             for x, n in ((allowed, 0), (largest, 1))]  # fmt: skip
    says(
        "layout_matrix.md",
        *(each.replace("e-0", "e-") for each in pairs),
        f"all layouts of up to {max(ranks)} processes",
        f"models in turn: {len(alternating(every))} cells",
        f"with every model: {len(every):,} cells",
        f"all {len(cells) - len(others)} cells of the models with one embedding, and {len(others)}"
        f" of the other two, of at most {max(of_others)} processes",
        f"the last part took {minutes[0]} minutes",
    )
    uneven = constant("tests/distributed/test_uneven_ranks.py", "CELLS")
    three, five = sorted({ranks for ranks, *_ in uneven})
    says(
        "layout_matrix.md",
        f"adds {three} and {five} data-parallel ranks",
        f"and {three} ranks under ZeRO-3 convert to {five}.",
    )


def test_the_faults_that_were_tried():
    hosts = " ".join(constant("tests/cluster/two_hosts.py", "RENDEZVOUS"))
    a, b = (re.findall(rf"--{key}=(\d)", hosts)[0] for key in ("nnodes", "nproc-per-node"))
    division = (ROOT / "tests/engine/training/test_loss_per_token.py").read_text()
    whole, half, single = re.findall(r'^(?:TOGETHER = |    )"(\d(?: [x+] \d)?)"', division, re.M)[
        :3
    ]
    within = set(re.findall(r"a(?:bs|tol)=(\S+?)[,)]", division))
    steps = int(re.findall(r'"train_iters": (\d+)', division)[0])
    tried = [constant("tests/soak/training.py", name) for name in ("PHASE", "PHASES", "FAULTS")]
    log = (ROOT / "tests" / "soak" / "training.log").read_text()
    sync, beside = (len(re.findall(r"^ ?\d+ ", part, re.M)) for part in log.split("--async")[:2])
    other = (ROOT / "tests" / "soak" / "beside_training.log").read_text().splitlines()
    well = sum(line.endswith(("ends well", "had ended")) for line in other)
    assert len(within) == 1
    says(
        "faults.md",
        f"{a} x {b} processes: a cut of {constant('tests/cluster/two_hosts.py', 'SHORT_CUT')} s",
        f"a batch of {whole} as {whole}, {half}, {single}, on two ranks",
        f"agree to {within.pop()}, as do the weights",
        f"the losses of {whole} and {single} differ clearly after {steps} steps.",
        f"one run of {tried[0] * tried[1]} steps {tried[2]} times: signals",
        f"{sync} faults with synchronous saving, {beside} with asynchronous.",
        f"the last {well} faults of {constant('tests/soak/beside_training.py', 'FAULTS')} (2026",
    )


def test_the_rehearsals():
    log = (ROOT / "tests" / "rehearsal" / "gloo.log").read_text()
    equal = len(re.findall(r"all equal ok$", log, re.M))
    code = (ROOT / "tests" / "rehearsal" / "faults.py").read_text()
    planted = code.split("\nFAULTS = {")[1].split("\n}")[0].count('\n    "')
    browser = (ROOT / "tests" / "pages" / "browser.py").read_text()
    (widths,) = re.findall(r"for width in \((\d+), (\d+)\)", browser)
    assert len(constant("tests/pages/browser.py", "PAGES")) == 6
    says(
        "plans_and_rehearsals.md",
        f"in all {equal} layouts of the covering set",
        f"{planted} faults that were planted into our code",
    )
    says(
        "overview.md",
        f"compared with {len(pd.read_csv(LAB / 'published_runs.csv'))} published runs",
        "opens six pages and a search in Chromium",
        f"with widths of {and_list(widths)} pixels",
    )
