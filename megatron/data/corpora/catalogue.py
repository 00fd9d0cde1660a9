"""The downloadable corpora with their addresses, licences and alternatives.

The catalogue contains the size and SHA-256 of a file only if these values are certain. For other
files, the length of the download is compared with the size that the server reports. The manifest of
token shards records the SHA-256 of each archive from which the shards were made.

Most original hosts of the Pile's data sets are gone (gpt-neox issues 909 and 949). Therefore a
corpus may list mirrors, and data sets of the Hugging Face hub that `prepare_data.py --input hub:ID`
can read. A corpus with a `pile_set` is a part of the Pile, namely the records whose
`meta.pile_set_name` equals `pile_set`. Such a corpus can also be extracted from the archives of the
complete Pile.
"""

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
    """A downloadable file.

    Attributes:
        urls: The addresses of the file. They are tried in order, because some may no longer work.
        size: The size in bytes, or None if it is not known for certain.
        sha256: The SHA-256 in hex, or None if it is not known for certain.
    """

    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The name of the file, which is the last part of its first address."""
        return self.urls[0].rsplit("/", 1)[1]


@dataclass(frozen=True)
class Corpus:
    """A downloadable corpus.

    Attributes:
        files: The archives of the corpus.
        licence: The licence of the text.
        pile_set: The name of the corpus in the Pile. None if the Pile does not contain it.
        hubs: The ids of data sets on the Hugging Face hub that contain the same text.
        note: A remark for the user.
    """

    # `pile_set` is the value of `meta.pile_set_name` in the Pile's records of this corpus.

    files: tuple[RemoteFile, ...]
    licence: str
    pile_set: str | None = None
    hubs: tuple[str, ...] = ()
    note: str = ""


_MIXED = "the Pile's: text under its authors' terms, collected for research"
_UNCOPYRIGHTED = "monology/pile-uncopyrighted"


def _pile_set(name: str, *urls: str, licence: str = _MIXED, hub: str = _UNCOPYRIGHTED) -> Corpus:
    """Return the `Corpus` for a data set of the Pile that is stored in one archive.

    Args:
        name: The name of the data set in the Pile.
        urls: The addresses from which the archive can be downloaded.
        licence: The licence of the text.
        hub: The id of a data set on the Hugging Face hub that contains the same text.
    """
    # The records of the data set have this `meta.pile_set_name`.
    return Corpus((RemoteFile(urls),), licence, name, (hub,))


CORPORA: dict[str, Corpus] = {
    "openwebtext2": _pile_set(
        "OpenWebText2",
        f"{_HUB}/segyges/OpenWebText2/resolve/main/openwebtext2.jsonl.zst.tar",
        f"{_PILE_SETS}/openwebtext2.jsonl.zst.tar",
        hub="segyges/OpenWebText2",
    ),
    "github": _pile_set("Github", "http://eaidata.bmk.sh/data/github_small.jsonl.zst"),
    "arxiv": _pile_set(
        "ArXiv",
        f"{_PILE_SETS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz",
        licence="arXiv's: the papers' own licences",
    ),
    "enwik8": Corpus(
        (RemoteFile(("http://mattmahoney.net/dc/enwik8.zip",), size=36_445_475),),
        "CC BY-SA and GFDL (Wikipedia, 2006)",
    ),
    "enron": _pile_set("Enron Emails", "http://eaidata.bmk.sh/data/enron_emails.jsonl.zst"),
    "europarl": _pile_set(
        "EuroParl", f"{_PILE_SETS}/EuroParliamentProceedings_1996_2011.jsonl.zst"
    ),
    "freelaw": _pile_set("FreeLaw", f"{_PILE_SETS}/FreeLaw_Opinions.jsonl.zst"),
    "nih": _pile_set("NIH ExPorter", f"{_PILE_SETS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst"),
    "pubmed": _pile_set("PubMed Central", f"{_PILE_SETS}/PMC_extracts.tar.gz"),
    "hackernews": _pile_set("HackerNews", f"{_PILE_SETS}/hn.tar.gz"),
    "ubuntu_irc": _pile_set("Ubuntu IRC", f"{_PILE_SETS}/ubuntu_irc_until_2020_9_1.jsonl.zst"),
    "pile_00": Corpus(
        (RemoteFile((f"{_EYE}/pile/train/00.jsonl.zst",)),),
        _MIXED,
        hubs=(_UNCOPYRIGHTED,),
        note="one of the Pile's 30 shards; --pile-set keeps some of its sets",
    ),
    "pile": Corpus(
        tuple(RemoteFile((f"{_EYE}/pile/train/{i:02}.jsonl.zst",)) for i in range(30)),
        _MIXED,
        hubs=(_UNCOPYRIGHTED,),
        note="--pile-set keeps some of its sets",
    ),
    "c4": Corpus(
        tuple(
            RemoteFile((f"{_HUB}/allenai/c4/resolve/main/en/c4-train.{i:05}-of-01024.json.gz",))
            for i in range(1024)
        ),
        "ODC-BY, and Common Crawl's terms",
        hubs=("allenai/c4:train:en",),
    ),
}

GPT2_FILES: dict[str, RemoteFile] = {
    name: RemoteFile(
        (f"{_S3}/{name}", f"{_GPT2}/{name.removeprefix('gpt2-')}"), size, FILE_HASHES[name]
    )
    for name, size in (("gpt2-vocab.json", 1_042_301), ("gpt2-merges.txt", 456_318))
}
"""The two files of GPT-2's tokenizer (MIT licence).

The keys are the names under which GPT-NeoX stores the files in the data folder.
"""


def find_corpus(name: str, others: tuple[str, ...] = ()) -> Corpus:
    """Return the known corpus with this name.

    Args:
        others: The names of other corpora, which the error message also lists.

    Raises:
        CorpusError: There is no such corpus. The error message suggests a similar name.
    """
    if name in CORPORA:
        return CORPORA[name]
    hint = did_you_mean(name, [*CORPORA, *others])
    raise CorpusError(
        f"{name}: unknown corpus; {hint}known: {', '.join([*others, *CORPORA])}; "
        "text files of your own: --input FILES --name NAME"
    )


def alternatives(name: str, corpus: Corpus) -> str:
    """Return a text that lists the ways to get a corpus if its download fails, one per line."""
    ways = [f"a copy you have: prepare_data.py {name} --input FILE"]
    ways += [f"an address that has it: prepare_data.py {name} --mirror URL_OF_ITS_FOLDER"]
    for hub in corpus.hubs:
        of_pile = hub == _UNCOPYRIGHTED and corpus.pile_set
        sets = f" --pile-set '{corpus.pile_set}'" if of_pile else ""
        ways.append(f"a data-set hub: prepare_data.py {name} --input hub:{hub}{sets}")
    if corpus.pile_set:
        ways.append(
            f"shards of the Pile: prepare_data.py {name} --input 'pile/*.jsonl.zst' --pile-set "
            f"'{corpus.pile_set}'"
        )
    return "\n".join(f"  - {way}" for way in ways)
