"""The corpora that have a name: their addresses, sizes, licences, and alternatives.

Sizes and SHA-256 are given only where they are certain. Otherwise a download is compared with the
length that the server announces, and the manifest of the shards records the SHA-256 of the input.
Most first hosts of the Pile's data sets are gone (gpt-neox issues 909 and 949), so each corpus
names alternatives: mirrors, data-set hub ids for `--input hub:ID`, and shards of the complete Pile,
of which `pile_set` selects one data set by its `meta.pile_set_name`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.errors import CorpusError
from megatron.data.tokenizers.gpt2 import FILE_HASHES
from megatron.suggest import did_you_mean

_EYE = "https://the-eye.eu/public/AI"
_PILE_SETS = f"{_EYE}/pile_preliminary_components"
_HUB = "https://huggingface.co/datasets"
_S3 = "https://s3.amazonaws.com/models.huggingface.co/bert"
_GPT2 = "https://huggingface.co/openai-community/gpt2/resolve/main"


@dataclass(frozen=True)
class RemoteFile:
    """A file and its present or former addresses. `size` in bytes, `sha256` in hex."""

    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.urls[0].rsplit("/", 1)[1]


@dataclass(frozen=True)
class Corpus:
    """A corpus. `text_bytes` and `documents` count the complete corpus, where known.

    `files`: the original archives. `pile_set`: the corpus's meta.pile_set_name in the Pile's
    shards. `hubs`: ids of data sets with the same text.
    """

    files: tuple[RemoteFile, ...]
    licence: str
    pile_set: str | None = None
    hubs: tuple[str, ...] = ()
    documents: int | None = None
    text_bytes: int | None = None
    note: str = ""


def _one(*urls: str, size: int | None = None, sha256: str | None = None) -> tuple[RemoteFile]:
    return (RemoteFile(urls, size, sha256),)


_MIXED = "the Pile's: text under its authors' terms, collected for research"
_UNCOPYRIGHTED = "monology/pile-uncopyrighted"

CORPORA: dict[str, Corpus] = {
    "openwebtext2": Corpus(
        _one(
            f"{_HUB}/segyges/OpenWebText2/resolve/main/openwebtext2.jsonl.zst.tar",
            f"{_PILE_SETS}/openwebtext2.jsonl.zst.tar",
        ),
        _MIXED, "OpenWebText2", ("segyges/OpenWebText2",), 17_103_000, 66_770_000_000,
    ),
    "github": Corpus(
        _one("http://eaidata.bmk.sh/data/github_small.jsonl.zst"),
        _MIXED, "Github", (_UNCOPYRIGHTED,), None, 95_160_000_000,
    ),
    "arxiv": Corpus(
        _one(f"{_PILE_SETS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz"),
        "arXiv's: the papers' own licences", "ArXiv", (_UNCOPYRIGHTED,), None, 56_210_000_000,
    ),
    "enwik8": Corpus(
        _one("http://mattmahoney.net/dc/enwik8.zip", size=36_445_475),
        "CC BY-SA and GFDL (Wikipedia, 2006)", None, (), 1, 100_000_000,
    ),
    "enron": Corpus(
        _one("http://eaidata.bmk.sh/data/enron_emails.jsonl.zst"),
        _MIXED, "Enron Emails", (_UNCOPYRIGHTED,), 517_401,
    ),
    "europarl": Corpus(
        _one(f"{_PILE_SETS}/EuroParliamentProceedings_1996_2011.jsonl.zst"),
        _MIXED, "EuroParl", (_UNCOPYRIGHTED,),
    ),
    "freelaw": Corpus(
        _one(f"{_PILE_SETS}/FreeLaw_Opinions.jsonl.zst"), _MIXED, "FreeLaw", (_UNCOPYRIGHTED,)
    ),
    "nih": Corpus(
        _one(f"{_PILE_SETS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst"),
        _MIXED, "NIH ExPorter", (_UNCOPYRIGHTED,),
    ),
    "pubmed": Corpus(
        _one(f"{_PILE_SETS}/PMC_extracts.tar.gz"), _MIXED, "PubMed Central", (_UNCOPYRIGHTED,)
    ),
    "hackernews": Corpus(
        _one(f"{_PILE_SETS}/hn.tar.gz"), _MIXED, "HackerNews", (_UNCOPYRIGHTED,), 373_000
    ),
    "ubuntu_irc": Corpus(
        _one(f"{_PILE_SETS}/ubuntu_irc_until_2020_9_1.jsonl.zst"),
        _MIXED, "Ubuntu IRC", (_UNCOPYRIGHTED,),
    ),
    "pile_00": Corpus(
        _one(f"{_EYE}/pile/train/00.jsonl.zst"), _MIXED, None, (_UNCOPYRIGHTED,),
        note="one of the Pile's 30 shards; --pile-set keeps some of its sets",
    ),
    "pile": Corpus(
        tuple(RemoteFile((f"{_EYE}/pile/train/{i:02}.jsonl.zst",)) for i in range(30)),
        _MIXED, None, (_UNCOPYRIGHTED,), note="--pile-set keeps some of its sets",
    ),
    "c4": Corpus(
        tuple(
            RemoteFile((f"{_HUB}/allenai/c4/resolve/main/en/c4-train.{i:05}-of-01024.json.gz",))
            for i in range(1024)
        ),
        "ODC-BY, and Common Crawl's terms", None, ("allenai/c4",),
    ),
}  # fmt: skip

GPT2_FILES: dict[str, RemoteFile] = {
    name: RemoteFile(
        (f"{_S3}/{name}", f"{_GPT2}/{name.removeprefix('gpt2-')}"), size, FILE_HASHES[name]
    )
    for name, size in (("gpt2-vocab.json", 1_042_301), ("gpt2-merges.txt", 456_318))
}
"""GPT-2's tokenizer (MIT licence), which GPT-NeoX keeps beside the data under these names."""


def find_corpus(name: str, others: tuple[str, ...] = ()) -> Corpus:
    """The corpus `name`; CorpusError, with the nearest known name, if it is unknown.

    `others` are names that the message lists too.
    """
    if name in CORPORA:
        return CORPORA[name]
    hint = did_you_mean(name, [*CORPORA, *others])
    raise CorpusError(
        f"{name}: unknown corpus; {hint}known: {', '.join([*others, *CORPORA])}; "
        "text files of your own: --input FILES --name NAME"
    )


def alternatives(name: str, corpus: Corpus) -> str:
    """Other ways to get a corpus, one per line, for when no address answers."""
    ways = [f"a copy you have: prepare_data.py {name} --input FILE"]
    ways += [f"an address that has it: prepare_data.py {name} --mirror URL_OF_ITS_FOLDER"]
    for hub in corpus.hubs:
        of_pile = hub == _UNCOPYRIGHTED and corpus.pile_set
        sets = f" --pile-set '{corpus.pile_set}'" if of_pile else ""
        ways.append(f"a data-set hub: --input hub:{hub}{sets} --name {name}")
    if corpus.pile_set:
        ways.append(
            f"shards of the Pile: --input 'pile/*.jsonl.zst' --pile-set '{corpus.pile_set}' "
            f"--name {name}"
        )
    return "\n".join(f"  - {way}" for way in ways)
