"""Test that the figures of the lab's pages are those of the code, the configs and the logs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from megatron.evaluation.suite import context, heads, key_tokens, pointer, recall, ruler
from megatron.evaluation.suite.intervals import FEWEST
from megatron.evaluation.suite.measure import Sample
from tests.cluster import two_hosts
from tests.distributed.matrix import STEPS, TOLERANCE, all_cells, alternating
from tests.evaluation.suite.confusion import DOCUMENTS, TOKENS
from tests.helpers.paths import ROOT
from tests.model.published_sizes import PYTHIA
from tests.mutation import server
from tests.mutation.log import EQUIVALENT, GONE, KILLED, SURVIVED, read
from tests.pages.browser import PAGES
from tests.pages.figures.held import (
    LAB,
    QUICKSTART,
    RESULTS,
    and_list,
    constant,
    grid,
    largest_errors,
    matrix_log,
    or_list,
    rows,
    says,
    scientific,
    word,
    yml,
)
from tests.soak import beside_training, training


def test_the_measures_of_the_suite():
    """The table of measures has the constants of the code."""
    tail = Sample.tail.fget(SimpleNamespace(longest=4096))
    by_position = pd.read_csv(ROOT / "docs/quickstart/suite/by_position.csv")
    first, second, third, fourth = by_position.context[:4]
    says(
        "lab/suite",
        f"predicted from {first}, {second}-{third - 1}, {third}-{fourth - 1}, ... tokens",
        f"the loss of the last {tail} tokens if the model",
        f"how much the loss of the last {tail} tokens changes",
        f"At least {context.SCORED:,} tokens are scored",
        f"where the last {or_list(pointer.ORDERS)} tokens stood",
        f"falls by more than {key_tokens.KEY_GAIN:g} nats through attention beyond W, and is then"
        f" below {key_tokens.KEY_LOSS:g}",
        f"each block of {recall.BLOCK} tokens of the first copy",
        f"at a depth of {or_list(f'{x:g}' for x in recall.DEPTHS)} of a text",
        f"the shortest of at least {ruler.SHORTEST} tokens, and the longest",
        f"more than {heads.COLLAPSED:.0%} of their attention on",
        f"read at up to {heads.LONGEST:,} tokens, its last {heads.QUERIES} queries count",
    )


def test_the_planted_models():
    found = pd.read_csv(RESULTS / "suite_planted.csv")
    wrong = found[found.right != "yes"]
    windows = [name.split()[-1] for name in found.model.unique() if name.startswith("window")]
    short, long = (wrong[wrong.model == name] for name in (f"window of {windows[0]}", "pointer"))
    assert {*short.question} == {"context"} and {*short.answer} == {"1"}
    assert {*long.question} == {"words"} and len({*long.answer}) == len({*long.expected}) == 1
    both = sorted({*short.seed} & {*long.seed})
    places = found[(found.question == "copy") & (found.model == "pointer")].expected
    length, longest = QUICKSTART.model.seq_length, max(QUICKSTART.evaluation.eval_lengths)
    first, last = sorted({*found.seed} - {*both})[0], sorted(found.seed)[-1]
    says(
        "lab/suite",
        f"with a window of {windows[0]}, of {windows[1]} and without limit",
        f"On {word(len(short))} seeds, no use of context beyond the last token is seen in the"
        f" window of {windows[0]}. On {word(len(long))} seeds, the pointer's common words are found"
        f" up to {long.answer.iloc[0]} instead of {long.expected.iloc[0]} tokens. Seeds {first}",
        f"the first fresh seed ({both[0]}) had shown both. Seed {last} was drawn",
        f"these {word(len(wrong))} are wrong, too",
        f"documents of each language instead of {DOCUMENTS}, and 102,400 tokens for each result"
        f" instead of {TOKENS:,}, all",
        f"those of {FEWEST} documents missed",
        f"the places that are found out of {places.iloc[0].count('@')}, and",
        f"trained at {length} tokens and read at {longest:,}, begins",
        f"Text beyond {length} tokens offers",
        f"(documents of at least {longest:,} tokens)",
    )


def test_the_paper_and_its_grids():
    table3, xl = grid("table3"), grid("xl")
    about, model = table3.about, xl.cells[0].config()
    sequences = yml("paper/paper_eval.yml")["eval_iters"]
    lengths, seeds = about.lengths, word(len(about.seeds))
    assert len(about.axes["embedding"]) == 6 and len(about.axes["corpus"]) == 3
    count = table3.cells[0].config().evaluation.eval_tokens // lengths[-1]
    assert count == sequences
    size = PYTHIA["small", 128][0]
    page = (LAB / "paper.md").read_text()
    says(
        "lab/paper",
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
    says("lab/paper", f"a window of {shown[0][2]} |", f"only the last {shown[0][2]} tokens.")


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
        "lab/paper",
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
        "lab/mutants",
        f"when seed {first['seed']} first ran.",
        f"then seed {second['seed']} was drawn. So its {killed} of {second['mutants']} show what",
        f"less than {server.SLOW:g} seconds each took part",
        f"after {new} instead of {old} steps, the smallest pass key is {int(lowest):,}, and",
    )
    places = re.findall(r"^\| `\w+/.*?\.py`(?: \((\d)\))? \|", page.read_text(), re.M)
    equivalent = [each for each in every if each.verdict == EQUIVALENT]
    assert sum(int(count or 1) for count in places) == len(equivalent)


def test_the_log_of_the_matrix_of_layouts():
    cells, comments = matrix_log()
    others = [each for each in cells if each.several]
    of_others = {each.processes for each in others}
    every = [cell for cell in all_cells(8) if cell != cell.truth]
    minutes = re.findall(r"0 failed; (\d) minutes for the last part", comments)
    assert STEPS == 10 and of_others == {1, 2}
    says(
        "lab/layout_matrix",
        "{} in fp32 and {} in bf16".format(*map(scientific, TOLERANCE.values())),
        largest_errors(cells),
        f"all layouts of up to {max(each.processes for each in cells)} processes",
        f"models in turn: {len(alternating(every))} cells",
        f"with every model: {len(every):,} cells",
        f"all {len(cells) - len(others)} cells of the models with one embedding, and {len(others)}"
        f" of the other two, of at most {max(of_others)} processes",
        f"the last part took {minutes[0]} minutes",
    )
    uneven = constant("tests/distributed/test_uneven_ranks.py", "CELLS")
    three, five = sorted({ranks for ranks, *_ in uneven})
    says(
        "lab/layout_matrix",
        f"adds {three} and {five} data-parallel ranks",
        f"and {three} ranks under ZeRO-3 convert to {five}.",
    )


def test_the_faults_that_were_tried():
    hosts = " ".join(two_hosts.RENDEZVOUS)
    a, b = (re.findall(rf"--{key}=(\d)", hosts)[0] for key in ("nnodes", "nproc-per-node"))
    division = (ROOT / "tests/engine/training/test_loss_per_token.py").read_text()
    whole, half, single = re.findall(r'^(?:TOGETHER = |    )"(\d(?: [x+] \d)?)"', division, re.M)[
        :3
    ]
    within = set(re.findall(r"a(?:bs|tol)=(\S+?)[,)]", division))
    steps = int(re.findall(r'"train_iters": (\d+)', division)[0])
    log = (ROOT / "tests" / "soak" / "training.log").read_text()
    sync, beside = (len(re.findall(r"^ ?\d+ ", part, re.M)) for part in log.split("--async")[:2])
    other = (ROOT / "tests" / "soak" / "beside_training.log").read_text().splitlines()
    well = sum(line.endswith(("ends well", "had ended")) for line in other)
    assert len(within) == 1
    says(
        "lab/faults",
        f"{a} x {b} processes: a cut of {two_hosts.SHORT_CUT} s",
        f"a batch of {whole} as {whole}, {half}, {single}, on two ranks",
        f"agree to {within.pop()}, as do the weights",
        f"the losses of {whole} and {single} differ clearly after {steps} steps.",
        f"one run of {training.PHASE * training.PHASES} steps {training.FAULTS} times: signals",
        f"{sync} faults with synchronous saving, {beside} with asynchronous.",
        f"the last {well} faults of {beside_training.FAULTS} (2026",
    )


def test_the_rehearsals():
    log = (ROOT / "tests" / "rehearsal" / "gloo.log").read_text()
    equal = len(re.findall(r"all equal ok$", log, re.M))
    code = (ROOT / "tests" / "rehearsal" / "faults.py").read_text()
    planted = code.split("\nFAULTS = {")[1].split("\n}")[0].count('\n    "')
    browser = (ROOT / "tests" / "pages" / "browser.py").read_text()
    (widths,) = re.findall(r"for width in \((\d+), (\d+)\)", browser)
    assert len(PAGES) == 6
    says(
        "lab/plans_and_rehearsals",
        f"in all {equal} layouts of the covering set",
        f"{planted} faults that were planted into our code",
    )
    says(
        "lab/overview",
        f"compared with {len(pd.read_csv(LAB / 'published_runs.csv'))} published runs",
        "opens six pages and a search in Chromium",
        f"with widths of {and_list(widths)} pixels",
    )
